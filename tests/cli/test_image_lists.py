"""Lists of images on stdin."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import complete, refused

from .outcomes import Run


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def give(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return give


@pytest.mark.parametrize(
    ("separator", "option"),
    [(b"\n", []), (b"\r\n", []), (b"\n\n", []), (b"\0", ["-0"])],
    ids=["lines", "crlf", "empty lines", "-0"],
)
@pytest.mark.parametrize("ends", [True, False], ids=["ends", "does not end"])
def test_a_list_of_paths(
    separator: bytes,
    option: list[str],
    ends: bool,
    featviz: Run,
    tiny_file: Path,
    picture: Path,
    out: Path,
    stdin: Callable[[bytes], None],
) -> None:
    """One path a line, whatever the line ends with, or between NULs; a path may hold blanks, and
    among NULs line ends."""
    other = picture.with_name("a b\nc.png" if option else "a b.png")
    other.write_bytes(picture.read_bytes())
    names = [os.fsencode(picture), os.fsencode(other)]
    stdin(separator.join(names) + separator * ends)
    outcome = featviz("run", tiny_file, "-", *option, "--json", "--out", out, "--layers", "0")
    found = [json.loads(line)["image"] for line in outcome.out.splitlines()]
    assert found == ["picture.png", other.name]


def test_a_listed_image_that_is_missing_fails_alone(
    featviz: Run, tiny_file: Path, picture: Path, out: Path, stdin: Callable[[bytes], None]
) -> None:
    """A stale line in a list fails that image, not the run."""
    stdin(b"gone.png\n" + os.fsencode(picture) + b"\n")
    outcome = featviz("run", tiny_file, "-", "--out", out, "--layers", "ReLU", "-q")
    refused(outcome, 3, "gone.png")
    assert complete(out) == ["picture.png"]
