"""The trainers: for each, TRL's class, its features in order, and what a script may read."""
