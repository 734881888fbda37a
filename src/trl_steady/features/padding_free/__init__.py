"""Run models without computing padding: cut columns, pack sequences, and group them by tokens."""
