"""What the processes of `forked` have imported when they begin."""

import atexit
import gc

import forked
from torch import distributed

from featviz import pipeline
from featviz.audit import compiled
from featviz.cli.commands import audit, exemplars, run
from featviz.drawing import compiled_tiles, scan
from featviz.exemplars import collecting
from featviz.pipeline import dry_run, processes

IMPORTED = (
    *(forked, distributed, pipeline, collecting, audit, exemplars, run),
    *(compiled, compiled_tiles, dry_run, processes),
)

scan.compiled()
gc.freeze()  # forked processes share the pages that the collector leaves alone
atexit.register(gc.unfreeze)  # else libraries of torch report leaks at the end
