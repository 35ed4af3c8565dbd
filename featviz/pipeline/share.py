"""Several processes on one run: each draws a share of the images, all into the same place."""

from __future__ import annotations

import os
import re

from featviz.errors import UsageError
from featviz.records import RunResult, Shard
from featviz.text import quoted

_TORCHRUN, _SLURM = ("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")


def shard_of_process() -> Shard | None:
    """The share that RANK and WORLD_SIZE (torchrun), or SLURM_PROCID and SLURM_NTASKS, name; None
    for a process that runs alone.

    Raises:
        UsageError: RANK and WORLD_SIZE do not fit each other.
    """
    return _shard_of(*_TORCHRUN) or (None if _given(*_TORCHRUN) else _shard_of(*_SLURM))


def runs_in_torchrun() -> bool:
    """Whether torchrun started this process as one of several."""
    return _shard_of(*_TORCHRUN) is not None


def refuse_shares(command: str, why: str) -> None:
    """Refuse to divide the images of a command that has to see all of them.

    Raises:
        UsageError: torchrun started several processes.
    """
    if runs_in_torchrun():
        shown = _shown(_given(*_TORCHRUN))
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


def _given(*names: str) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


def _shown(given: dict[str, str]) -> str:
    return " and ".join(f"{name}={quoted(value, 20)}" for name, value in given.items())


def _shard_of(rank_name: str, count_name: str) -> Shard | None:
    given = _given(rank_name, count_name)
    if given.get(count_name, "1") == "1" and given.get(rank_name, "0") == "0":
        return None
    if len(given) == 1 and rank_name in _SLURM:  # salloc and sbatch set one without the other
        return None
    words = [given.get(name, "") for name in (rank_name, count_name)]
    rank, count = (int(w) if re.fullmatch(r"[0-9]{1,9}", w) else -1 for w in words)
    if 0 <= rank < count:
        return Shard(rank, count)
    raise UsageError(
        f"{_shown(given)} name no process of several: {rank_name} is to be from 0 to "
        f"{count_name} - 1",
        "start with torchrun or srun, or unset them",
    )
