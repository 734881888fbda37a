"""The tokens that sampling kept: as data, taken from what generates, and what a policy's log-probs are among them."""
