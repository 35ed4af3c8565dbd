"""The compiled loops on a fresh machine, and where numba cannot keep them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest
from conftest import DIGITS, DIGITS_MODEL
from drawn_maps import files
from numba.core.dispatcher import Dispatcher

from featviz.drawing import deflate, loops

COUNTING = """
import atexit, os, sys
from numba.core import event

with event.install_recorder("numba:compile") as recorder:
    from featviz import cli

    code = cli.guarded(sys.argv[1:])
names = [e.data["dispatcher"].py_func.__module__ for _, e in recorder.buffer if e.is_start]
print("COMPILED", sum(name.startswith("featviz") for name in names), len(names), file=sys.stderr)
sys.exit(code)
"""
IMAGE = DIGITS / "00-5.png"


def drawn(folder: Path, *words: str | Path, **variables: str) -> tuple[int, int]:
    """Run a command in a process; how many functions numba compiled, featviz's own and
    all."""
    done = subprocess.run(
        [sys.executable, "-c", COUNTING, *map(str, words)],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    interpreted, compiled = done.stderr.split("COMPILED")[1].split()
    return int(interpreted), int(compiled)


@pytest.mark.slow
def test_bytes_do_not_depend_on_numbas_cache(tmp_path: Path) -> None:
    """A first run, a second one that compiles nothing, and one whose cache and home are
    no folders write the same bytes; few functions are compiled, and none of numba's for
    texts or sorting."""
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "below")
    kept = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    lost = {"NUMBA_CACHE_DIR": nowhere, "HOME": nowhere, "XDG_CACHE_HOME": nowhere}
    # nor in a folder inside the package
    if hasattr(numba.config, "CACHE_LOCATOR_CLASSES"):
        lost["NUMBA_CACHE_LOCATOR_CLASSES"] = "UserProvidedCacheLocator"
    counts = []
    trees = []
    for variables in (kept, kept, lost):
        (tmp_path / "work").mkdir()
        command = ("run", DIGITS_MODEL, IMAGE, "--out", "out")
        counts.append(drawn(tmp_path / "work", *command, **variables))
        trees.append(files(tmp_path / "work" / "out"))
        (tmp_path / "work").rename(tmp_path / f"work {len(trees)}")
    assert trees[0]
    assert trees[0] == trees[1] == trees[2]
    first, second, uncached = counts
    assert first[0] <= 12
    assert first[1] <= 16
    assert second == (0, 0)
    if "NUMBA_CACHE_LOCATOR_CLASSES" in lost:
        assert uncached == first


def test_each_loop_has_one_signature() -> None:
    """Arrays of another layout or dtype would have it compiled again, unseen."""
    found = [
        v
        for m in (loops, deflate)
        for v in vars(m).values()
        if isinstance(v, Dispatcher)
    ]
    kept = [loop for loop in found if loop.stats.cache_path]
    assert len(kept) >= 8
    assert all(len(loop.signatures) <= 1 for loop in kept)
