"""The public functions, for notebooks and other programs: objects in, objects out."""

from featviz.api.notebook import html_of
from featviz.api.running import diff, report, run, sheet
from featviz.api.studies import audit, cam, exemplars, field, kernels, layers, look
from featviz.api.tensors import capture, grid
from featviz.api.watching import Watcher
