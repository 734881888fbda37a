"""Reward models on the policy's own base, which learn from the policy's completions while it trains."""
