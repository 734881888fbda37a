"""The losses: a table of what each one is, and the objective of a micro-batch."""
