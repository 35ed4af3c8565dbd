"""Several processes on one run: torchrun starts them, and each takes its share of the images."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from featviz.errors import FeatvizError, UsageError
from featviz.records import Shard
from featviz.text import quoted

T = TypeVar("T")

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

    def share(self, shard: Shard | None) -> Shard:
        """This process's share of the images.

        Raises:
            UsageError: `shard` is given, and torchrun divides the images already.
        """
        if shard is not None and self.size > 1:
            raise UsageError("--shard divides what torchrun divides already", "leave it out")
        return shard or Shard(self.rank, self.size)

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
        with _deaths_reported():
            dist.all_gather_object(values, value)
        return values

    def _share(self, value: T) -> T:
        """The first process's value, in all."""
        if self.size == 1:
            return value
        values = [value]
        with _deaths_reported():
            dist.broadcast_object_list(values, src=0)
        return values[0]


ALONE = World()


@contextmanager
def _deaths_reported() -> Iterator[None]:
    """gloo sees at once that the connection to another process is gone."""
    try:
        yield
    except RuntimeError as error:
        raise FeatvizError(
            "another process of this run has ended before its time",
            "what it said comes first; what is complete stays complete, --resume goes on",
        ) from error


@contextmanager
def world() -> Iterator[World]:
    """Join the processes that torchrun started; alone where there are none.

    Messages between them are small objects of Python, so they go by gloo on any device.

    Raises:
        UsageError: the variables that torchrun sets are there in part.
        FeatvizError: the other processes cannot be reached.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" or "RANK" not in os.environ:
        yield World()
        return
    try:
        dist.init_process_group("gloo", timeout=_PATIENCE)
    except ValueError as error:
        raise UsageError(
            f"WORLD_SIZE and RANK are set, but {error}", "start with torchrun"
        ) from error
    except RuntimeError as error:
        raise FeatvizError(f"the other processes cannot be reached: {error}") from error
    try:
        yield World(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
