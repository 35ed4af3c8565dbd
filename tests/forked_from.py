"""What the processes of `forked` have imported when they begin."""

import atexit
import gc

import forked
from torch import distributed

from featviz import pipeline
from featviz.cli import run, study
from featviz.drawing import deflate, loops
from featviz.exemplars import collect
from featviz.pipeline import dry_run

IMPORTED = (forked, distributed, pipeline, collect, study, run, deflate, loops, dry_run)

gc.freeze()  # forked processes share the pages that the collector leaves alone
atexit.register(gc.unfreeze)  # else libraries of torch report leaks at the end
