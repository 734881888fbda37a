"""Adapters of a PEFT policy: their precision, and their weights for an inference engine."""
