"""Reports of a run: what its log shows, what is wrong with it, and what to set."""

from trl_steady.report.diagnosis import Finding, diagnose
from trl_steady.report.history import History

__all__ = ["Finding", "History", "diagnose"]
