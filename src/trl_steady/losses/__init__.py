"""The losses: one file for each of ours, and a table of all."""
