"""The critic of PPO: its model, its values and targets, and its updates."""
