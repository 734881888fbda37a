"""The trainers: for each, TRL's class, its parts in order, and its objective."""
