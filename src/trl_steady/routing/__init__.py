"""Routes of a mixture of experts: as data, taken from a model or an engine, and replayed on a model."""
