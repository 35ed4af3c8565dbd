"""`diff`: two runs compared. `diff.py` tells the story."""

from featviz.diff.diff import compare_runs, diff, maps_folder
from featviz.options.commands import DiffThresholds

__all__ = ["DiffThresholds", "compare_runs", "diff", "maps_folder"]
