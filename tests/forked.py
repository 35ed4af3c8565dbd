"""Commands in processes of their own that begin at once: they are forked from a process
that has imported torch, and has begun no threads."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from conftest import Outcome

LONGEST = 120
"""Seconds after which a process counts as one that hangs."""

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["forked_from"])


@dataclass(frozen=True)
class Forked:
    """A process that has begun."""

    process: BaseProcess
    streams: Path
    """What it prints: this name with `.out` and `.err`."""

    def kill(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def ended(self) -> Outcome:
        """Wait for it; a signal that has ended it is a negative code."""
        self.process.join(LONGEST)
        assert self.process.exitcode is not None, f"{self.streams.name} hangs"
        out, err = (
            self.streams.with_suffix(f".{n}").read_text() for n in ("out", "err")
        )
        return Outcome(self.process.exitcode, out, err)


def fork(
    streams: Path,
    function: Callable[..., object],
    *arguments: object,
    **variables: object,
) -> Forked:
    """Begin a function of a module in a process of its own, with one thread for torch
    and these variables in its environment; `streams` is where `.out` and `.err` are
    written."""
    environment = {
        **os.environ,
        **{name: str(value) for name, value in variables.items()},
    }
    process = _CONTEXT.Process(
        target=_inside, args=(streams, environment, function, arguments), daemon=True
    )
    # for the process that all others are forked from
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
    process.start()
    return Forked(process, streams)


def command(streams: Path, *arguments: object, **variables: object) -> Forked:
    """Begin `featviz ARGUMENTS`."""
    return fork(streams, featviz, *map(str, arguments), **variables)


def team(streams: Path, *arguments: object, count: int) -> list[Forked]:
    """Begin `featviz ARGUMENTS` in several processes, as srun or mpirun start them."""
    streams.mkdir()
    return [
        command(streams / str(n), *arguments, WORLD_SIZE=count, RANK=n)
        for n in range(count)
    ]


def meeting(count: int) -> dict[str, object]:
    """How so many processes find one another."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def ended(processes: Iterable[Forked]) -> list[Outcome]:
    """Wait for all of them."""
    return [process.ended() for process in processes]


def featviz(*arguments: str) -> None:
    """The command line, which ends the process."""
    from featviz.cli import main

    sys.argv = ["featviz", *arguments]
    main()


def _inside(
    streams: Path,
    environment: Mapping[str, str],
    function: Callable[..., object],
    arguments: Iterable[object],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "err")):
        opened = os.open(
            streams.with_suffix(f".{name}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        )
        os.dup2(opened, number)
        os.close(opened)
    function(*arguments)
