"""`diff`: two runs compared. `diff.py` tells the story."""

from featviz.diff.diff import diff
from featviz.diff.matching import compare_runs
from featviz.options.commands import DiffThresholds

__all__ = ["DiffThresholds", "compare_runs", "diff"]
