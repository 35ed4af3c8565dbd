"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from featviz.errors import StoreError
from featviz.files import real
from featviz.rundir import atomic
from featviz.rundir.ownership import Claim

ClaimOf = Callable[[Path], Claim | None]
"""One of `ownership`'s: the result that a folder holds, None where there is none of ours."""


def check_free(
    root: Path,
    overwrite: bool,
    claim_of: ClaimOf,
    marks: Sequence[str],
    besides: Collection[Path] = (),
) -> None:
    """Say before the work that a folder cannot become the result's.

    Args:
        marks: the records of which a folder that may be replaced has one.
        besides: files that the user has named for this command to write.

    Raises:
        StoreError: it is a file, holds something that featviz did not write, or an earlier result
            without `overwrite`.
    """
    if root.exists() and not root.is_dir():
        raise StoreError(f"--out {root} is a file, not a folder", "name another with --out")
    if not root.is_dir() or not any(root.iterdir()):
        return
    earlier = claim_of(root)
    if earlier is None:
        there = [mark for mark in marks if (root / mark).exists()]
        raise StoreError(
            f"--out {root} is not empty and holds no {' or '.join(marks)}"
            + (" that featviz wrote" if there else ""),
            "name another folder with --out",
        )
    if not overwrite:
        raise StoreError(
            f"--out {root} holds another result",
            "--overwrite replaces it, --out names another folder",
        )
    earlier.check(besides)


@contextmanager
def replacing(root: Path, claim_of: ClaimOf, besides: Collection[Path] = ()) -> Iterator[Path]:
    """A folder beside `root` to write into, which takes its place if the block succeeds.

    Raises:
        StoreError: it cannot be made, written into or moved, or `root` has come to hold something
            that featviz did not write; names `root`.
    """
    final = real(root)
    fresh = final.with_name(atomic.part_name(final.name))
    old = fresh.with_suffix(".old")
    try:
        with _reported(root):
            fresh.mkdir(parents=True)
            yield fresh
            ways = _to_go(final, claim_of, besides)
            _swap(fresh, final, old)
            _carry(old, final, besides)
            atomic.remove(old, ways)
            atomic.remove_empty(old)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _to_go(final: Path, claim_of: ClaimOf, besides: Collection[Path]) -> list[str]:
    """The files of an earlier result, looked for anew: the work before may have taken hours."""
    if not final.is_dir() or not any(final.iterdir()):
        return []
    earlier = claim_of(final)
    if earlier is None:
        raise StoreError(
            f"--out {final} has come to hold files that featviz did not write",
            "name another folder with --out",
        )
    return earlier.files(besides)


def _carry(old: Path, final: Path, besides: Collection[Path]) -> None:
    """Keep those files of the old folder that this command has yet to write, or goes on with."""
    for path in besides:
        way = os.path.relpath(os.path.realpath(path), final)
        if not way.startswith(os.pardir) and (old / way).is_file():
            (final / way).parent.mkdir(parents=True, exist_ok=True)
            (old / way).replace(final / way)


def _swap(fresh: Path, final: Path, old: Path) -> None:
    """Put one folder in the place of another, which is gone only when that has succeeded."""
    if final.exists():
        final.replace(old)
    try:
        fresh.replace(final)
    except OSError:
        if old.exists():
            old.replace(final)
        raise


@contextmanager
def _reported(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{root} cannot be written: {error.strerror or error}",
            "choose another place with --out, or make room",
        ) from error
