"""Rewards of steps, turned into advantages of tokens."""
