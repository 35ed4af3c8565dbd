"""The compiled loops on a fresh machine, and where numba cannot keep them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import forked
import numba
import pytest
from conftest import DIGITS, DIGITS_MODEL
from numba.core.dispatcher import Dispatcher
from runs import tree

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


class Drawing(NamedTuple):
    """A run in a process of its own."""

    compiled: tuple[int, int]
    """How many functions numba compiled: featviz's own, and all."""
    files: dict[str, bytes]


ARGUMENTS = ["run", str(DIGITS_MODEL), str(DIGITS / "00-5.png"), "--out", "out"]


def run_and_count(folder: str) -> None:
    """In a process that is forked: run a digit in a folder."""
    os.chdir(folder)
    sys.argv = ["featviz", *ARGUMENTS]
    exec(COUNTING)


def drawing(folder: Path, code: int, err: str) -> Drawing:
    """The run of a process that has ended."""
    assert code == 0, err
    of_featviz, of_all = err.split("COMPILED")[1].split()
    files = tree(folder / "out")
    shutil.rmtree(folder / "out")
    return Drawing((int(of_featviz), int(of_all)), files)


def draw_with_cache(folder: Path) -> Drawing:
    """Run a digit in a process that finds numba's cache."""
    done = forked.fork(folder / "process", run_and_count, str(folder)).ended()
    return drawing(folder, done.code, done.err)


def draw_without_cache(folder: Path, **variables: str) -> Drawing:
    """Run a digit in a new Python: where its cache lies numba asks when the loops are
    imported."""
    done = subprocess.run(
        [sys.executable, "-c", COUNTING, *ARGUMENTS],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return drawing(folder, done.returncode, done.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cold")


@pytest.fixture(scope="module")
def cached(folder: Path) -> Drawing:
    """A run that finds all loops in the cache of these tests, where an earlier run left
    them, if need be one for this purpose."""
    first = draw_with_cache(folder)
    return first if first.compiled == (0, 0) else draw_with_cache(folder)


@pytest.fixture(scope="module")
def uncached(folder: Path) -> Drawing:
    """A run whose cache and home are no folders, nor in a folder inside the package."""
    (folder / "file").touch()
    nowhere = str(folder / "file" / "below")
    return draw_without_cache(
        folder,
        NUMBA_CACHE_DIR=nowhere,
        HOME=nowhere,
        XDG_CACHE_HOME=nowhere,
        NUMBA_CACHE_LOCATOR_CLASSES="UserProvidedCacheLocator",
    )


@pytest.mark.slow
def test_bytes_do_not_depend_on_numbas_cache(
    cached: Drawing,
    uncached: Drawing,
) -> None:
    """A run that has to compile writes the bytes of a run that has not."""
    assert cached.files
    assert cached.files.keys() == uncached.files.keys()
    assert cached.files == uncached.files


@pytest.mark.slow
def test_a_cache_spares_the_compiler(cached: Drawing) -> None:
    """A run whose loops are in the cache compiles nothing."""
    assert cached.compiled == (0, 0)


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(numba.config, "CACHE_LOCATOR_CLASSES"),
    reason="this numba keeps a cache inside the package",
)
def test_few_functions_are_compiled(uncached: Drawing) -> None:
    """numba compiles few functions, and none of its own for texts or sorting."""
    of_featviz, of_all = uncached.compiled
    assert 0 < of_featviz <= 12
    assert of_all <= 16


def test_each_loop_has_one_signature() -> None:
    """Arrays of another layout or dtype would have it compiled again, unseen."""
    functions = [*vars(loops).values(), *vars(deflate).values()]
    dispatchers = [value for value in functions if isinstance(value, Dispatcher)]
    cached = [loop for loop in dispatchers if loop.stats.cache_path]
    assert len(cached) >= 8
    assert all(len(loop.signatures) <= 1 for loop in cached)
