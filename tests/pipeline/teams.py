"""Several processes on one run, as torchrun or somebody else starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping

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


def alone(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The same in one process."""
    return subprocess.run(
        [sys.executable, "-m", "featviz", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def without_torchrun(
    *arguments: object, count: int, variables: Mapping[str, str]
) -> list[subprocess.Popen[str]]:
    """As srun or mpirun start processes: nobody ends the others when one of them has died."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "featviz", *map(str, arguments)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **common, **variables, "OMP_NUM_THREADS": "1", "RANK": str(rank)},
        )
        for rank in range(count)
    ]
