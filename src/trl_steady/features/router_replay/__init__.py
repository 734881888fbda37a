"""Routes of a mixture of experts: record them, read them from an engine, and replay them on a model."""
