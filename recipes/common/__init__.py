"""Code that the recipes share: a small model, a task for it, evaluation, and comparisons of runs."""

import warnings

import trl_steady  # noqa: F401, before transformers, so that its filter of bitsandbytes' log is there

# those that TRL owes transformers would bury the progress
warnings.simplefilter("ignore", FutureWarning)
