"""Several processes on one run: how they meet, wait for each other and learn that one has died."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from featviz.errors import FeatvizError, UsageError
from featviz.records import Shard
from featviz.text import quoted

T = TypeVar("T")

_POLL = 0.1
"""Seconds after which a signal is heeded while processes wait for each other."""

_GRACE = 5.0
"""Seconds that a process is given to say by itself that it has not met the others."""

_BEGUN = "featviz/begun"
_RESTARTS = ("MAX_RESTARTS", "RESTART_COUNT")

_PATIENCE = timedelta(days=30)
"""How long a process that is done waits for the others: their images may take longer."""


def parse_shard(text: str) -> Shard:
    """Read `I/N`, the I-th of N parts.

    Raises:
        UsageError: it is not 1 <= I <= N.
    """
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if match and 1 <= int(match[1]) <= int(match[2]):
        return Shard(int(match[1]) - 1, int(match[2]))
    raise UsageError(
        f"--shard {quoted(text)!r} is no part of a whole", "I/N with I from 1 to N: 2/8"
    )


def speaks() -> bool:
    """Whether this is the process that speaks where torchrun started several: the first, known
    without joining the others."""
    return os.environ.get("RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1"


@dataclass(frozen=True)
class World:
    """The processes that work together; one, unless torchrun started more."""

    rank: int = 0
    size: int = 1
    store: Store | None = field(default=None, repr=False, compare=False)
    """What the processes write down for each other; None for one alone."""
    lasting: Store | None = field(default=None, repr=False, compare=False)
    """The same, kept when torchrun starts the processes again."""

    def share(self, shard: Shard | None) -> Shard:
        """The share of the images that this team takes.

        Raises:
            UsageError: `shard` is given, and torchrun divides the images already.
        """
        if shard is not None and self.size > 1:
            raise UsageError("--shard divides what torchrun divides already", "leave it out")
        return shard or Shard()

    def within(self, name: str) -> World:
        """The same processes, for one of several things that they do one after the other."""
        store = None if self.store is None else PrefixStore(name, self.store)
        return replace(self, store=store)

    @property
    def begun(self) -> Path | None:
        """The folder that this team has begun to write, before torchrun started it again."""
        with suppress(RuntimeError):
            if self.lasting is not None and self.lasting.check([_BEGUN]):
                return Path(json.loads(self.lasting.get(_BEGUN)))
        return None

    def begin(self, folder: Path) -> None:
        """Note that this team writes a folder: started again, it goes on there."""
        with suppress(RuntimeError):
            if self.lasting is not None:
                self.lasting.set(_BEGUN, json.dumps(str(folder)))

    @property
    def may_restart(self) -> bool:
        """Whether torchrun starts the processes again if one of them fails."""
        most, before = (os.environ.get(f"TORCHELASTIC_{n}", "0") for n in _RESTARTS)
        return most.isdecimal() and before.isdecimal() and int(most) > int(before)

    def leave(self, note: object) -> None:
        """Leave a note for those who live longer: anything that JSON knows."""
        with suppress(RuntimeError):
            if self.store is not None:
                self.store.set(f"note/{self.rank}", json.dumps(note))

    def notes(self) -> list[Any]:
        """The notes that there are by now, as far as they can still be read."""
        keys = [f"note/{rank}" for rank in range(self.size)]
        with suppress(RuntimeError):
            if self.store is not None:
                there = [key for key in keys if self.store.check([key])]
                return [json.loads(self.store.get(key)) for key in there]
        return []

    @property
    def first(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    def at_first(self, task: Callable[[], T]) -> T:
        """Let the first process do something while the others wait; all get what it gives.

        Raises:
            FeatvizError: it failed there, or a process has died.
            SystemExit: it failed in the first process, which says why; this is another.
        """
        result, failure = None, None
        if self.first:
            try:
                result = task()
            except FeatvizError as error:
                failure = error
        result, code = self._share((result, failure and failure.exit_code))
        if failure is not None:
            raise failure
        if code is not None:
            raise SystemExit(code)
        return cast(T, result)

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in the order of their ranks.

        Raises:
            FeatvizError: a process has died.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with deaths_reported():
            dist.all_gather_object(values, value)
        return values

    def _share(self, value: T) -> T:
        """The first process's value, in all."""
        if self.size == 1:
            return value
        values = [value]
        with deaths_reported():
            dist.broadcast_object_list(values, src=0)
        return values[0]


ALONE = World()


@contextmanager
def deaths_reported() -> Iterator[None]:
    """A lost connection to another process, which gloo sees at once, as one line.

    Raises:
        FeatvizError: another process has died.
    """
    try:
        yield
    except RuntimeError as error:
        raise FeatvizError(
            "another process of this run has ended before its time",
            "what it said comes first; what is complete stays complete, --resume goes on",
        ) from error


@contextmanager
def world(timeout: float) -> Iterator[World]:
    """Join the processes that torchrun started; alone where there are none.

    Messages between them are small objects of Python, so they go by gloo on any device.

    Args:
        timeout: seconds to wait for the others at the start; their work may take as long as it
            does.

    Raises:
        UsageError: the variables that torchrun sets are there in part, or do not fit each other.
        FeatvizError: the other processes cannot be reached.
        KeyboardInterrupt: a signal came meanwhile.
    """
    rank, size = _place_among_all()
    if size == 1:
        yield World()
        return
    lasting = _join(rank, size, timeout)
    try:
        yield World(rank, size, _of_this_attempt(lasting), lasting)
    finally:
        dist.destroy_process_group()


def _place_among_all() -> tuple[int, int]:
    """RANK and WORLD_SIZE; 0 and 1 where neither is set."""
    given = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    if given["RANK"] is None and given["WORLD_SIZE"] in (None, "1"):
        return 0, 1
    shown = " and ".join(f"{n}={quoted(v, 20)}" for n, v in given.items() if v is not None)
    words = [value or "" for value in given.values()]
    rank, size = (int(w) if re.fullmatch(r"[0-9]{1,9}", w) else -1 for w in words)
    if not 0 <= rank < size:
        raise UsageError(
            f"{shown} name no process of several: RANK is to be from 0 to WORLD_SIZE - 1",
            "start with torchrun, or unset them",
        )
    return rank, size


def _join(rank: int, size: int, timeout: float) -> Store:
    """Meet the others in a thread: the call ends for no signal, but waiting for a thread does.

    Python's interpreter does not wait for the thread at its end.
    """
    met: list[Store] = []
    failed: list[BaseException] = []

    def meet() -> None:
        try:
            met.append(_meet(rank, size, timedelta(seconds=timeout)))
        except BaseException as error:
            failed.append(error)

    thread = Thread(target=meet, name="featviz-rendezvous", daemon=True)
    thread.start()
    end = monotonic() + timeout + _GRACE
    while thread.is_alive() and monotonic() < end:
        thread.join(_POLL)
    if failed:
        raise _unmet(failed[0], timeout) from failed[0]
    if not met:  # gloo has no timeout of its own for one that dies while it is being connected
        raise _unmet(TimeoutError("one of them does not answer"), timeout)
    return met[0]


def _meet(rank: int, size: int, patience: timedelta) -> Store:
    lasting: Store
    lasting, _, _ = next(rendezvous("env://", rank, size, timeout=patience))
    lasting.set_timeout(patience)
    store = _of_this_attempt(lasting)
    store.set(f"featviz/{rank}", "here")
    store.wait([f"featviz/{other}" for other in range(size)], patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_PATIENCE)
    return lasting


def _of_this_attempt(lasting: Store) -> Store:
    """torchrun keeps one store for all its attempts: what dead processes have left in it would be
    taken for that of those who live."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"featviz/attempt{attempt}", lasting)


def _unmet(error: BaseException, timeout: float) -> FeatvizError:
    if isinstance(error, ValueError):
        return UsageError(f"WORLD_SIZE and RANK are set, but {error}", "start with torchrun")
    reason = quoted(str(error).splitlines()[0] if str(error) else type(error).__name__)
    return FeatvizError(
        f"the other processes were not there within {timeout:g} s: {reason}",
        "start all of them with torchrun; --timeout SECONDS waits longer",
    )
