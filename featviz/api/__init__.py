"""The public functions, for notebooks and other programs: objects in, objects out."""

from featviz.api.comparing import diff, report
from featviz.api.explaining import cam, look
from featviz.api.model import kernels, layers
from featviz.api.running import run
from featviz.api.streaming import audit, exemplars
from featviz.api.tensors import capture, grid
from featviz.api.watching import Watcher

__all__ = [
    "Watcher",
    "audit",
    "cam",
    "capture",
    "diff",
    "exemplars",
    "grid",
    "kernels",
    "layers",
    "look",
    "report",
    "run",
]
