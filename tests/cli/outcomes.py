"""Networks for the command line, and command lines in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

NETS = """
from torch import nn

class Picky(nn.Module):
    def forward(self, x):
        if x.shape[-1] == 13:
            raise ValueError("no picture may be 13 wide")
        return x

def picky():
    return nn.Sequential(nn.Conv2d(1, 2, 1), nn.Sequential(nn.ReLU(), Picky()))

def grey(width=2):
    return nn.Sequential(nn.Conv2d(1, width, 3), nn.ReLU(inplace=True))
"""


APART = """
import contextlib, io, json, os, shlex, sys, time
from featviz import cli
for line in json.load(sys.stdin):
    if not os.fork():
        with contextlib.redirect_stdout(io.StringIO()) as out:
            with contextlib.redirect_stderr(io.StringIO()) as err:
                code = cli.guarded(shlex.split(line))
        seconds = time.process_time()
        heavy = ("torch", "torchvision", "numpy", "PIL", "matplotlib", "rich")
        imported = [name for name in heavy if name in sys.modules]
        print(json.dumps([code, out.getvalue(), err.getvalue(), imported, seconds]), flush=True)
        os._exit(0)
    os.wait()
"""


class Apart(NamedTuple):
    """What a command line gave in a process of its own."""

    code: int
    out: str
    err: str
    imported: list[str]
    """Heavy packages."""
    seconds: float
    """Of the processor, since the process was forked."""


def apart(lines: Sequence[str], folder: Path) -> list[Apart]:
    """Run command lines in a folder, each in a process of its own, which is forked from
    one that has imported the command line alone."""
    done = subprocess.run(
        [sys.executable, "-c", APART],
        input=json.dumps(lines),
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return [Apart(*json.loads(line)) for line in done.stdout.splitlines()]
