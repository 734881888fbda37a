"""A model with a scalar head: what the critic of PPO and the reward model share."""
