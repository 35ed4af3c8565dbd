"""Lists of images on stdin."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
from runs import complete, refused

from .outcomes import Run


@pytest.mark.parametrize(("separator", "option"), [(b"\n", []), (b"\0", ["-0"])])
def test_a_list_of_paths(
    separator: bytes,
    option: list[str],
    featviz: Run,
    tiny_file: Path,
    picture: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One path a line, or between NULs, where a path may hold line ends. A stale one fails that
    image, not the run."""
    other = picture.with_name("a b\nc.png" if option else "a b.png")
    other.write_bytes(picture.read_bytes())
    names = [os.fsencode(picture), b"gone.png", os.fsencode(other)]
    stdin = io.TextIOWrapper(io.BytesIO(separator.join(names)))
    monkeypatch.setattr(sys, "stdin", stdin)
    done = featviz("run", tiny_file, "-", *option, "--json", "--out", out, "--layers", "0", "-q")
    refused(done, 3, "gone.png")
    found = [json.loads(line)["image"] for line in done.out.splitlines()]
    assert found == ["picture.png", "gone.png", other.name] and len(complete(out)) == 2
