"""`diff`: two runs compared. `diff.py` tells the story."""

from featviz.diff.diff import Outputs, compare_runs, diff
from featviz.options import DiffThresholds

__all__ = ["DiffThresholds", "Outputs", "compare_runs", "diff"]
