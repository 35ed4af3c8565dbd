"""Several processes on one run: each draws a share of the images, all into the same place."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from featviz.errors import UsageError
from featviz.records import RunResult, Shard
from featviz.text import quoted

_TORCHRUN, _SLURM = ("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")
_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}


def shard_of_process() -> Shard | None:
    """The share that RANK and WORLD_SIZE (torchrun), or SLURM_PROCID and SLURM_NTASKS, name; None
    for a process that runs alone."""
    given = _given(_TORCHRUN) or _given(_SLURM)
    if given.items() <= _ALONE.items():
        return None
    numbers = [int(w) if re.fullmatch(r"[0-9]{1,9}", w) else -1 for w in given.values()]
    if len(numbers) == 2 and 0 <= numbers[0] < numbers[1]:
        return Shard(*numbers)
    if len(given) == 1 and given.keys() <= set(_SLURM):  # salloc and sbatch set one of them
        return None
    raise UsageError(
        f"{_shown(given)} name no process of several: the number of a process is to be from 0 to "
        "that of all of them - 1",
        "start with torchrun or srun, or unset them",
    )


def runs_in_torchrun() -> bool:
    """Whether torchrun started this process as one of several."""
    return bool(_given(_TORCHRUN)) and shard_of_process() is not None


def refuse_shares(command: str, why: str) -> None:
    """Refuse to divide the images of a command that has to see all of them."""
    if runs_in_torchrun():
        shown = _shown(_given(_TORCHRUN))
        raise UsageError(
            f"{command} cannot be divided among processes ({shown}): {why}",
            "start it without torchrun",
        )


def exit_code(result: RunResult) -> int:
    """The exit code of one of several processes. torchrun ends the others where one says that
    images have failed, so the last one says it for all."""
    only_failed = result.failures and not (result.missing or result.interrupted)
    if only_failed and not result.whole and runs_in_torchrun():
        return 0
    return result.exit_code or (3 if result.whole and result.all_failures else 0)


def _given(names: Sequence[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


def _shown(given: dict[str, str]) -> str:
    return " and ".join(f"{name}={quoted(value, 20)}" for name, value in given.items())
