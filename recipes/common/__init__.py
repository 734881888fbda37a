"""Code that the recipes share: a small model, a task for it, evaluation, progress and reports."""
