"""torchrun, and a model for those who are to be killed; `forked` starts teams in less time."""

from __future__ import annotations

import os
import subprocess
import sys

SLOW = """
import os, signal, time
from pathlib import Path
from torch import nn

class Slow(nn.Module):
    '''A convolution that takes PAUSE seconds; at its DIE_AT-th pass process DIE_RANK is killed.'''
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)
        self.passes = 0
        nn.init.constant_(self.conv.weight, 0.5)
        nn.init.zeros_(self.conv.bias)
    def forward(self, x):
        time.sleep(float(os.environ.get("PAUSE", "0")))
        self.passes += 1
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        dies = first and os.environ.get("RANK") == os.environ.get("DIE_RANK", "none")
        if dies and self.passes == int(os.environ["DIE_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.conv(x)
"""


def torchrun(
    *arguments: object, count: int = 2, restarts: int = 0, **more: object
) -> subprocess.Popen[str]:
    """One thread a process, as torchrun sets it, so that numbers equal those of one process."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={count}", f"--max-restarts={restarts}"),
            *("-m", "featviz", *map(str, arguments)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **more,  # type: ignore[call-overload]
    )
