"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from featviz.errors import StoreError


def check_free(root: Path, overwrite: bool, marks: Sequence[str]) -> None:
    """Say before the work that a folder cannot become the result's.

    Args:
        marks: files of which a folder that may be replaced has one.

    Raises:
        StoreError: it is a file, holds something else, or an earlier result without `overwrite`.
    """
    if root.exists() and not root.is_dir():
        raise StoreError(f"--out {root} is a file, not a folder", "name another with --out")
    if not root.is_dir() or not any(root.iterdir()):
        return
    if not any((root / mark).is_file() for mark in marks):
        raise StoreError(
            f"--out {root} is not empty and holds no {' or '.join(marks)}",
            "name another folder with --out",
        )
    if not overwrite:
        raise StoreError(
            f"--out {root} holds another result",
            "--overwrite replaces it, --out names another folder",
        )


@contextmanager
def replacing(root: Path) -> Iterator[Path]:
    """A folder beside `root` to write into, which takes its place if the block succeeds.

    Raises:
        StoreError: it cannot be made, written into or moved; names `root`.
    """
    final = root.resolve()
    fresh = final.with_name(f".{final.name}.{os.getpid()}.part")
    old = fresh.with_suffix(".old")
    try:
        with _reported(root):
            fresh.mkdir(parents=True)
            yield fresh
            _swap(fresh, final, old)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


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
