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
    [
        *("RUN.JSON", "stats.npz", "con.txt", ".hidden", "a:b.png"),
        *("x" * 150, "é" * 150, "漢" * 90, "x." + "y" * 150, "x" * 150 + ".tiff"),
    ],
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
    assert text.safe_path("/".join(["e" * 90] * 8)).count("/") == 7
    assert "/" not in text.safe_path("/".join(["é" * 90] * 8))


def test_a_way_has_so_many_folders() -> None:
    """Thirty-two; beyond them, one name stands for all."""
    assert text.safe_path("/".join(["e"] * 32)).count("/") == 31
    assert "/" not in text.safe_path("/".join(["e"] * 33))


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


@pytest.mark.parametrize(
    ("share", "written"),
    [
        (0, "0.0 %"),
        (0.0001, "< 0.1 %"),
        (0.0005, "0.1 %"),
        (0.4321, "43.2 %"),
        (0.9994, "99.9 %"),
        (0.9995, "> 99.9 %"),
        (1, "100.0 %"),
    ],
)
def test_only_nothing_and_all_are_written_so(share: float, written: str) -> None:
    """A share that is nearly 0 or 1 says so."""
    assert text.percent(share) == written
    assert text.percent(share, "") == written.replace(" ", "")


def test_a_table_escapes_what_a_terminal_would_obey() -> None:
    """Names in cells, totals and lines below come from files; columns stay aligned."""
    rows = [["\x1b[2J", "1"], ["é", "20"]]
    table = text.TextTable(["name", "count"], ["count"], rows, [["\r", "21"]], ["\n"])
    assert str(table).split("\n") == [
        "name     count",
        r"\x1b[2J      1",
        "é           20",
        r"\r          21",
        r"\n",
    ]


@pytest.mark.parametrize(
    ("label", "named"),
    [
        ("4", "layer 4"),
        ("0.conv", "layer 0.conv"),
        ("layer1.0", "layer1.0"),
        ("", ""),
    ],
)
def test_a_label_that_begins_with_a_number_is_called_a_layer(
    label: str, named: str
) -> None:
    """Others are read as a name within a sentence."""
    assert text.layer_named(label) == named


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("a.png is no picture", "a.png is no picture"),
        ("a.png: cut off", "a.png: cut off"),
        ("a.pngs are no pictures", "a.png: a.pngs are no pictures"),
        ("cut off", "a.png: cut off"),
    ],
)
def test_a_message_names_its_image_once(message: str, named: str) -> None:
    """Not again where it begins with it."""
    assert text.of_image("a.png", message) == named


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (412, "0.4 kB"),
        (9_949, "9.9 kB"),
        (52_300, "52 kB"),
        (99_499, "99 kB"),
        (100_000, "0.1 MB"),
        (25_340_000, "25.3 MB"),
    ],
)
def test_sizes_of_small_files_are_not_zero(count: int, words: str) -> None:
    """Below a tenth of a megabyte they are in kB."""
    assert text.size_text(count) == words
