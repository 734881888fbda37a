"""Options: one config for each trainer, valid values, contradictions, and options without effect."""
