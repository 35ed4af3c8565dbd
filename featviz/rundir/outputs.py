"""Single files that commands write: one that is there is replaced only if featviz wrote it, or with
`--overwrite`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from featviz.errors import StoreError
from featviz.files import open_regular
from featviz.rundir.atomic import atomic
from featviz.rundir.ownership import BROKEN, GENERATOR, HEAD, is_archive_of_report


@dataclass(frozen=True)
class FileKind:
    """A kind of file that featviz writes."""

    noun: str
    is_ours: Callable[[BinaryIO], bool]
    """Whether an open file is such a file of featviz; may raise where it is another one."""


PAGE = FileKind("page of featviz", lambda file: GENERATOR in file.read(HEAD))
JUNIT = FileKind("JUnit XML of featviz", lambda f: b'<testsuites name="featviz ' in f.read(HEAD))
PRUNING = FileKind("file that says featviz wrote it", lambda file: False)  # lists of numbers do not
REPORT_ARCHIVE = FileKind("report of featviz", is_archive_of_report)


def picture_of(command: str) -> FileKind:
    """A PNG that a command wrote, by its text chunk `Software`."""

    def is_ours(file: BinaryIO) -> bool:
        with Image.open(file, formats=["PNG"]) as opened:
            return bool(opened.info.get("Software") == f"featviz {command}")

    return FileKind(f"picture of featviz {command}", is_ours)


def check_file(out: Path, kind: FileKind, option: str = "--out", overwrite: bool = False) -> None:
    """Refuse a place that holds something else than an earlier file of the same kind.

    Raises:
        StoreError: it does, and `overwrite` is not given; or it is a folder.
    """
    if out.is_dir():
        raise StoreError(f"{option} {out} is a folder, not a file", f"name a file with {option}")
    if overwrite or not out.exists():
        return
    try:
        with open_regular(out) as file:
            ours = kind.is_ours(file)
    except BROKEN:
        ours = False
    if not ours:
        raise StoreError(
            f"{option} {out} is there and is no {kind.noun}",
            f"--overwrite replaces it; or name another file with {option}",
        )


@contextmanager
def writing(
    out: Path, kind: FileKind, option: str = "--out", overwrite: bool = False
) -> Iterator[BinaryIO]:
    """Write a file of a kind, which takes its place when all is written.

    Raises:
        StoreError: something else is in its place, or it cannot be written.
    """
    check_file(out, kind, option, overwrite)
    with atomic(out) as file:
        yield file
