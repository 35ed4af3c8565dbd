"""What the processes of `forked` have imported when they begin."""

import atexit
import gc

import forked
from torch import distributed

from featviz.cli import inspect, run
from featviz.drawing import deflate, loops
from featviz.exemplars import collect
from featviz.run import dry_run
from featviz.run import run as pipeline

IMPORTED = (
    forked,
    distributed,
    pipeline,
    collect,
    inspect,
    run,
    deflate,
    loops,
    dry_run,
)

gc.freeze()  # forked processes share the pages that the collector leaves alone
atexit.register(gc.unfreeze)  # else libraries of torch report leaks at the end
