"""The command `trl-steady`: run scripts with our trainers, list methods, and check an installation."""
