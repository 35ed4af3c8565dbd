"""Several processes on one run: torchrun starts them, and each takes its share of the images."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from featviz.errors import FeatvizError, UsageError
from featviz.records import Shard

T = TypeVar("T")


def parse_shard(text: str) -> Shard:
    """Read `I/N`, the I-th of N parts.

    Raises:
        UsageError: it is not 1 <= I <= N.
    """
    index, slash, count = text.partition("/")
    if slash and index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count):
        return Shard(int(index) - 1, int(count))
    raise UsageError(f"--shard {text!r} is no part of a whole", "I/N with I from 1 to N: 2/8")


@dataclass(frozen=True)
class World:
    """The processes that work together; one, unless torchrun started more."""

    rank: int = 0
    size: int = 1

    @property
    def shard(self) -> Shard:
        """This process's share."""
        return Shard(self.rank, self.size)

    @property
    def first(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    def at_first(self, task: Callable[[], T]) -> T | None:
        """Let the first process do something while the others wait.

        Raises:
            FeatvizError: it failed there; in all processes.
        """
        result, failure = None, None
        if self.first:
            try:
                result = task()
            except FeatvizError as error:
                failure = error
        failed = self._share(None if failure is None else (failure.message, failure.hint))
        if failure is not None:
            raise failure
        if failed is not None:
            raise SystemExit(1)  # the first process has said why
        return result

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in the order of their ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def _share(self, value: Any) -> Any:
        """The first process's value, in all."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]


@contextmanager
def world() -> Iterator[World]:
    """Join the processes that torchrun started; alone where there are none.

    Messages between them are small objects of Python, so they go by gloo on any device.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        yield World()
        return
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size())
    finally:
        if mine:
            dist.destroy_process_group()
