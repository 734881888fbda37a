"""Batches without their padding: what is cut off, what is laid end to end, and what goes through a model together."""
