"""Candidates of sampling: store them, record them from `generate`, and compute log-probs among them."""
