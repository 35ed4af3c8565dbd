"""Which device a model runs on."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from featviz.errors import UsageError

if TYPE_CHECKING:
    import torch


def check_name(name: str) -> None:
    """Refuse what is the name of no device anywhere; needs no torch.

    Raises:
        UsageError: names those that there are.
    """
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", name):
        raise UsageError(f"--device {name!r} is no device", "one of auto, cpu, cuda, cuda:N, mps")


def pick_device(name: str) -> torch.device:
    """`auto` takes cuda, then mps, then the CPU; of processes that torchrun started on one machine,
    each takes a GPU of its own, as long as there are some.

    Raises:
        UsageError: no such device here.
    """
    import torch

    check_name(name)
    if name == "auto" and torch.cuda.is_available():
        rank = os.environ.get("LOCAL_RANK")
        return torch.device(f"cuda:{int(rank) % torch.cuda.device_count()}" if rank else "cuda")
    if name == "auto":
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    device = torch.device(name)
    count = {"cpu": 1, "mps": int(torch.backends.mps.is_available())}.get(
        device.type, torch.cuda.device_count()
    )
    if (device.index or 0) >= count:
        raise UsageError(
            f"--device {name}: this machine has {count} {device.type} devices", "try --device auto"
        )
    return device
