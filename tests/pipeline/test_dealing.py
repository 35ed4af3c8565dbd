"""Processes that divide work: each item to exactly one of them, more to those that are faster."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread

import pytest
from torch.distributed import HashStore

from featviz.errors import FeatvizError
from featviz.pipeline import dealing, processes
from featviz.pipeline.dealing import Counter, Deal
from featviz.pipeline.processes import ALONE, World


def team_of(size: int) -> list[World]:
    """Processes that keep one store, here as threads of one process."""
    store = HashStore()
    return [World(rank, size, store, store) for rank in range(size)]


def each(team: list[World], task: Callable[[World], object]) -> None:
    """Do something in all of them at the same time."""
    threads = [Thread(target=task, args=(world,)) for world in team]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("size", [1, 2, 3, 16])
@pytest.mark.parametrize("total", [0, 1, 5, 64, 1000])
def test_hands_are_a_partition(total: int, size: int) -> None:
    """In order, without gaps, eight at most, never growing, and one by one at the end."""
    hands = dealing.hands(total, size)
    assert [item for hand in hands for item in hand] == list(range(total))
    lengths = [len(hand) for hand in hands]
    assert all(1 <= n <= 8 for n in lengths) and lengths == sorted(lengths, reverse=True)
    assert lengths[-size:] == [1] * min(size, len(lengths))


def test_each_item_goes_to_one_process() -> None:
    """Four at the same time: the union is all, nobody has one that another has, and each gets its
    own in their order."""
    got: dict[int, list[int]] = {}

    def take(world: World) -> None:
        got[world.rank] = list(Deal(world, range(500), "images"))

    each(team_of(4), take)
    assert sorted(item for items in got.values() for item in items) == list(range(500))
    assert all(a < b for items in got.values() for a, b in pairwise(items))


def test_a_slow_process_holds_nobody_up() -> None:
    """One stops in its first image until the others are through: they take all that it has not
    taken, which is eight at most."""
    first, slow, third = (Deal(world, range(100), "images") for world in team_of(3))
    begun = iter(slow)
    next(begun)
    others = [*first, *third]
    assert len(others) >= 92 and sorted([0, *others, *begun]) == list(range(100))


def test_an_end_is_for_all() -> None:
    """What --fail-fast does: nobody takes anything more."""
    one, other = (Deal(world, range(9), "images") for world in team_of(2))
    first = iter(one)
    assert (next(first), next(iter(other))) == (0, 1)
    other.end()
    assert list(first) == [] and list(other) == []


def test_what_is_expected_becomes_what_was_had() -> None:
    """The bar of one process begins with its part of all, and ends at what it has done."""
    one, other = (Deal(world, range(10), "images") for world in team_of(2))
    assert one.expected == 5
    assert len(list(one)) == 10 and one.expected == 10
    assert list(other) == [] and other.expected == 0


def test_alone_all_is_taken_in_order() -> None:
    """Each time anew, also in one process that runs twice."""
    assert [list(Deal(ALONE, "abcdefghijk", "images")) for _ in range(2)] == [
        list("abcdefghijk")
    ] * 2


@pytest.mark.parametrize("count", [0, 1, 2, 5])
@pytest.mark.parametrize("ahead", [1, 3])
def test_the_next_items_are_known(count: int, ahead: int) -> None:
    """They are read ahead; behind the last one there is none."""
    items = list(range(count))
    expected = [(one, items[one + 1 : one + 1 + ahead]) for one in items]
    assert list(dealing.with_next(items, ahead)) == expected


def test_whole_archives_are_taken_where_there_are_enough() -> None:
    """Each is read by one process only; a loose image, or fewer archives, are dealt by number."""
    lying = ["a", "a", "b", "c", "c", "c"]
    assert dealing.whole_archives(lying, 3) == [range(2), range(2, 3), range(3, 6)]
    assert dealing.whole_archives(lying, 4) == dealing.whole_archives([*lying, None], 2) == []
    assert dealing.whole_archives(lying, 1) == dealing.whole_archives([], 2) == []


def test_counters_are_those_of_the_team() -> None:
    """Limits hold for all processes together, and each counter counts for itself."""
    one, other = team_of(2)
    assert Counter(one, "bytes").add(5) == 5
    assert (Counter(other, "bytes").add(7), Counter(other, "files").add(1)) == (12, 1)
    assert [Counter(ALONE, "bytes").add(3) for _ in range(2)] == [3, 3]


def test_where_the_counter_is_gone_a_process_has_died() -> None:
    """One line that says what to do, not what the socket said."""

    class Gone(HashStore):
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("Broken pipe")

    with pytest.raises(FeatvizError, match="another process of this run has ended"):
        list(Deal(World(1, 2, Gone()), range(3), "images"))


def test_notes_outlive_who_left_them() -> None:
    """Those that there are, in the order of the ranks; None where the store is gone, or there was
    never more than one process."""
    team = team_of(3)
    team[2].leave({"a\udcff.png": None, "b.png": "is no image"})
    team[0].leave({})
    assert team[1].notes() == [{}, {"a\udcff.png": None, "b.png": "is no image"}]
    ALONE.leave({"a": None})
    assert ALONE.notes() == []


def test_where_a_team_has_begun_is_known_to_the_next_one(tmp_path: Path) -> None:
    """torchrun's store stays when it starts the processes again; alone nothing is known."""
    one, other = team_of(2)
    assert one.begun is None
    one.begin(tmp_path / "\udcff é")
    assert other.begun == tmp_path / "\udcff é"
    ALONE.begin(tmp_path)
    assert ALONE.begun is None


def test_one_that_dies_while_it_is_being_met_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call that connects the processes never returns: --timeout ends the wait, with one
    line."""
    monkeypatch.setattr(processes, "_meet", lambda *known: Event().wait())
    monkeypatch.setattr(processes, "_GRACE", 0.0)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    expected = r"were not there within 0.2 s: one of them does not answer"
    with pytest.raises(FeatvizError, match=expected), processes.world(0.2):
        pytest.fail("there is no other process")
