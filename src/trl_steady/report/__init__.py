"""Reports of a run: what its log shows, what is wrong with it, and what to set."""

from trl_steady.report.history import History
from trl_steady.report.symptoms import Finding, diagnose

__all__ = ["Finding", "History", "diagnose"]
