"""Words of messages: ranges, lists and sizes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featviz import text


@pytest.mark.medium
@settings(deadline=None)
@given(st.lists(st.integers(0, 40), unique=True, min_size=1))
def test_ranges_are_read_back(numbers: list[int]) -> None:
    """Any numbers, in any order, come back as they were written."""
    assert text.read_ranges(text.ranges(numbers)) == numbers


@pytest.mark.parametrize(
    ("limit", "written"),
    [
        (1, "0-2 and 5 more"),
        (2, "0-2,5 and 4 more"),
        (4, "0-2,5,7-9,12"),
        (None, "0-2,5,7-9,12"),
    ],
)
def test_ranges_beyond_a_limit_are_counted_by_their_numbers(
    limit: int | None, written: str
) -> None:
    """Not by how many ranges they are."""
    assert text.ranges([0, 1, 2, 5, 7, 8, 9, 12], limit) == written


def test_gaps_say_a_reason_once() -> None:
    """With its first three layers; what is left out counts layers, not reasons."""
    skipped = dict.fromkeys("abcde", "is None") | dict.fromkeys("xyz", "")
    skipped |= {str(number): f"reason {number % 2}" for number in range(5)}
    (line,) = text.gaps(skipped, [])
    assert line.startswith("skipped: a, b, c and 2 more (is None), x, y, z ()")
    assert line.endswith(", layer 0, layer 2, layer 4 (reason 0) and 2 more")


@pytest.mark.parametrize(
    "wrong", ["", "a", "3-1", "1,,2", "-1", "1-", "0-1000000", "٣", "1 2"]
)
def test_what_is_no_range_is_named(wrong: str) -> None:
    """The error is the part that cannot be read, also where it stands among others."""
    with pytest.raises(ValueError):
        text.read_ranges(wrong)
    with pytest.raises(ValueError, match=r"^3-1$"):
        text.read_ranges("0-2,3-1")


@pytest.mark.parametrize(
    "name",
    ["RUN.JSON", "stats.npz", "con.txt", ".hidden", "a:b.png", "x" * 150, "é" * 150],
)
def test_names_that_a_system_or_we_refuse_are_changed(name: str) -> None:
    """Each becomes one that stays, and that no other name becomes."""
    safe = text.safe_name(name)
    assert safe != name
    assert text.safe_name(safe) == safe
    assert len(safe.encode()) <= 200
    assert text.safe_name("cat.jpg") == "cat.jpg" != safe != text.safe_name(f"{name}2")


def test_a_way_is_as_long_as_its_bytes() -> None:
    """The system counts bytes, and not letters: one name stands for a way that is too
    long."""
    assert text.safe_way("/".join(["e" * 90] * 8)).count("/") == 7
    assert "/" not in text.safe_way("/".join(["é" * 90] * 8))


@pytest.mark.parametrize(
    ("count", "noun", "words"),
    [
        (1, "image", "1 image"),
        (0, "image", "0 images"),
        (2000, "image", "2,000 images"),
        (1, "class", "1 class"),
        (3, "class", "3 classes"),
    ],
)
def test_one_thing_is_no_plural(count: int, noun: str, words: str) -> None:
    """Of a noun that ends in s, too."""
    assert text.counted(count, noun) == words
