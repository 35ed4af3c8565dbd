"""How processes divide work: each takes the next few items when it is done with those it has, so
that a slow one holds nobody up, and a dead one loses no more than it had taken."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Generic, TypeVar

from torch._C._distributed_c10d import HashStore

from featviz.pipeline.processes import World, deaths_reported

T = TypeVar("T")

MOST = 8
"""Items that a process takes at a time, at most."""


class Counter:
    """A number to which all processes of a team add."""

    def __init__(self, team: World, name: str) -> None:
        """Begin at 0.

        Args:
            name: the same in all processes, and of no other counter of this team.
        """
        self._store = HashStore() if team.store is None else team.store
        self._name = f"counter/{name}"

    def add(self, amount: int) -> int:
        """Add an amount, and return what all processes together have added by now.

        Raises:
            FeatvizError: the process that keeps the number has died.
        """
        with deaths_reported():
            return int(self._store.add(self._name, amount))


class Deal(Generic[T]):
    """The items that this process takes, in their order; no other process takes the same ones."""

    def __init__(
        self, team: World, items: Sequence[T], name: str, archives: Sequence[object] = ()
    ) -> None:
        """Take nothing yet.

        Args:
            items: of the whole team, the same in all processes.
            name: as that of a Counter.
            archives: the archive that each item lies in, or None. Where all lie in archives and
                there are enough of them, one process takes a whole archive.
        """
        self._items, self._team = items, team
        self._hands = whole_archives(archives, team.size) or hands(len(items), team.size)
        self._taken = Counter(team, name)
        self._mine, self._left = 0, len(items)

    def __iter__(self) -> Iterator[T]:
        """Take items until there are none left.

        Raises:
            FeatvizError: the process that counts them has died.
        """
        while (number := self._taken.add(1) - 1) < len(self._hands):
            hand = self._hands[number]
            self._mine, self._left = self._mine + len(hand), len(self._items) - hand.stop
            yield from self._items[hand.start : hand.stop]
        self._left = 0

    def end(self) -> None:
        """Leave nothing for any process to take."""
        self._taken.add(len(self._hands))

    @property
    def expected(self) -> int:
        """How many items this process will have had in the end if all are equally fast."""
        return self._mine + -(-self._left // self._team.size)


def hands(total: int, size: int) -> list[range]:
    """What is taken at a time by one of `size` processes: up to eight of `total` items, and towards
    the end one by one, so that all processes end together."""
    found: list[range] = []
    begin = 0
    while begin < total:
        end = begin + max(1, min(MOST, (total - begin) // (4 * size)))
        found.append(range(begin, end))
        begin = end
    return found


def whole_archives(archives: Sequence[object], size: int) -> list[range]:
    """What is taken at a time where it is a whole archive; nothing where items lie in none, or in
    fewer archives than there are processes."""
    if size == 1 or None in archives or len(set(archives)) < size:
        return []
    ends = list(accumulate(len(list(own)) for _, own in groupby(archives)))
    return [range(begin, end) for begin, end in pairwise([0, *ends])]


def with_next(items: Iterable[T], count: int = 1) -> Iterator[tuple[T, list[T]]]:
    """Each item with those behind it, `count` at most, which are taken before this one is done."""
    waiting: deque[T] = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > count:
            yield waiting.popleft(), list(waiting)
    while waiting:
        yield waiting.popleft(), list(waiting)
