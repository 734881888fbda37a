"""The critic of PPO: where it begins, its values and targets, and its updates."""
