"""Where a result is written: apart from what is read, and in the place of an earlier one only if
that may go."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from PIL import Image

from featviz.errors import FileError, StoreError, UsageError
from featviz.files import open_regular, real
from featviz.rundir import (
    AUDIT_FILE,
    BASES_FILE,
    DIFF_FILE,
    EXEMPLARS_FILE,
    INDEX_FILE,
    LOCK_FILE,
    MODELS_FILE,
    RUN_FILE,
    lock,
)
from featviz.rundir.atomic import (
    folder_part_of,
    part_name,
    part_of,
    remove,
    remove_empty,
    reported,
)
from featviz.rundir.ownership import Claim, of_audit, of_diff, of_exemplars, of_report, of_run
from featviz.text import quoted

_PART, _OLD = ".part", ".old"
"""Ends of the hidden names of a folder that is to stand in a place, and of one that has stood
there."""


@dataclass(frozen=True)
class ResultKind:
    """A kind of result that has a folder of its own."""

    noun: str
    claim_of: Callable[[Path], Claim | None]
    """The result that a folder holds; None where there is none of featviz."""
    marks: tuple[str, ...]
    """Records of which such a folder has one."""
    parts: tuple[str, ...] = ()
    """Files whose unfinished parts a killed command may leave in an otherwise empty folder."""

    def is_free(self, root: Path, besides: Collection[Path]) -> bool:
        """Whether a folder holds nothing but what this command will write itself."""
        apart = {real(path) for path in [*besides, root / LOCK_FILE]}
        return all(
            part_of(path.name) in self.parts or real(path) in apart for path in root.iterdir()
        )


RUN = ResultKind("run", of_run, (RUN_FILE,), (RUN_FILE, BASES_FILE))
AUDIT = ResultKind("audit", of_audit, (AUDIT_FILE, MODELS_FILE))
DIFF = ResultKind("diff", of_diff, (DIFF_FILE,))
EXEMPLARS = ResultKind("exemplars", of_exemplars, (EXEMPLARS_FILE,))
REPORT_FOLDER = ResultKind("report", of_report, (INDEX_FILE,))


def _holds_another(root: Path, earlier: Claim) -> StoreError:
    return StoreError(
        f"--out {root} holds another result",
        "--overwrite replaces it, --out names another folder",
    )


def check_free(
    root: Path,
    kind: ResultKind,
    overwrite: bool,
    besides: Collection[Path] = (),
    taken: Callable[[Path, Claim], StoreError] = _holds_another,
) -> Claim | None:
    """Say before the work that a folder cannot become the result's.

    Args:
        besides: files that the user has named for this command to write.
        taken: words the refusal of a folder that holds an earlier result.

    Returns:
        The earlier result, which is to be replaced; None where there is none.

    Raises:
        StoreError: it is a file, holds something that featviz did not write, or an earlier result
            without `overwrite`.
    """
    if root.exists() and not root.is_dir():
        raise StoreError(f"--out {root} is a file, not a folder", "name another with --out")
    if not root.is_dir() or kind.is_free(root, besides):
        return None
    earlier = kind.claim_of(root)
    if earlier is None:
        there = [mark for mark in kind.marks if (root / mark).exists()]
        raise StoreError(
            f"--out {root} is not empty and holds no {kind.noun} of featviz"
            + (f": its {there[0]} is none that featviz wrote" if there else ""),
            "name another folder with --out",
        )
    if earlier.complete and not overwrite:
        raise taken(root, earlier)
    earlier.check(besides)
    return earlier


@contextmanager
def replacing(root: Path, kind: ResultKind, besides: Collection[Path] = ()) -> Iterator[Path]:
    """A folder beside `root` to write into, which takes its place if the block succeeds: the result
    appears whole or not at all. Meanwhile `root` is locked.

    Raises:
        StoreError: it cannot be made, written into or moved, another process writes it, or `root`
            has come to hold something that featviz did not write; names `root`.
    """
    final = real(root)
    fresh = final.with_name(part_name(final.name))
    try:
        with lock.held(root), reported(root, "choose another place with --out, or make room"):
            for path in _left_beside(final):
                shutil.rmtree(path, ignore_errors=True)
            for path in _left_beside(final, _OLD):
                _remove_result(path, kind)
            fresh.mkdir(parents=True)
            yield fresh
            put_in_place(fresh, final, kind, besides)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def place_beside(root: Path) -> Path | None:
    """A hidden name for a run that is to take the place of the one in a folder, which this process
    holds.

    None where no folder can be put in its place: it is a mounted disk, or the folder above it
    cannot be written.
    """
    final = real(root)
    if final.is_mount() or not os.access(final.parent, os.W_OK):
        return None
    return final.with_name(part_name(final.name))


def clear_beside(root: Path) -> None:
    """Remove the runs that killed processes have left beside a folder, which this process holds:
    those that were to take its place, and those whose place was taken."""
    for suffix in ("", _OLD):
        for path in _left_beside(real(root), suffix):
            _remove_result(path, RUN)


def _remove_result(path: Path, kind: ResultKind) -> None:
    """Remove a result, its record last; a folder in which there is anything else stays."""
    with suppress(StoreError):
        if (left := kind.claim_of(path)) is not None:
            remove(path, [LOCK_FILE, *left.files()])
        remove_empty(path)


def _left_beside(final: Path, suffix: str = "") -> list[Path]:
    """Hidden folders in which processes that were killed have written what was to stand here, or
    with the suffix of an old one what has stood here."""
    short = folder_part_of(part_name(final.name))
    return [
        path
        for path in final.parent.iterdir()
        if path.name.endswith(suffix)
        and folder_part_of(path.name.removesuffix(suffix) + (_PART if suffix else "")) == short
        and path.is_dir()
        and not path.is_symlink()
    ]


def put_in_place(
    fresh: Path, final: Path, kind: ResultKind, besides: Collection[Path] = ()
) -> None:
    """Put a finished folder in the place of an earlier result, which is removed.

    Raises:
        StoreError: something that featviz did not write has come to be there.
        OSError: it cannot be moved; then the earlier result stays.
    """
    old = fresh.with_suffix(_OLD)
    ways = _to_go(final, kind, besides)
    _swap(fresh, final, old)
    _carry(old, final, besides)
    remove(old, [LOCK_FILE, *ways])
    remove_empty(old)


def _to_go(final: Path, kind: ResultKind, besides: Collection[Path]) -> list[str]:
    """The files of an earlier result, looked for anew: the work before may have taken hours."""
    if not final.is_dir() or kind.is_free(final, besides):
        return []
    earlier = kind.claim_of(final)
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


def check_apart(out: Path, option: str, inputs: Iterable[Path]) -> None:
    """Refuse to write where an input is: over it, or into a folder that holds it.

    A folder below that of the images is fine: it was none of them when the command began.

    Args:
        out: the file or folder that will be written.
        option: by which it was named.
        inputs: files and folders that the command reads.

    Raises:
        UsageError: names the first input that is in the way.
    """
    place = os.path.realpath(out)
    within = place.rstrip(os.sep) + os.sep
    real_folder = cache(os.path.realpath)  # of 10,000 images there are few
    for path in inputs:
        for form in _forms(path, real_folder):
            if form == place or form.startswith(within):
                what = "is" if form == place else "holds"
                raise UsageError(
                    f"{option} {quoted(str(out))} {what} the input {quoted(str(path))}",
                    f"name another place with {option}",
                )


def check_picture(out: Path, software: str, noun: str, overwrite: bool | None = None) -> None:
    """Whether nothing, or an earlier picture of the same command, is in a picture's place.

    Args:
        software: what the command writes into the PNG as `Software`: `featviz sheet`.
        noun: what such a picture is called: `sheet of featviz`.
        overwrite: whether any other file may go as well; None where the command has no such option.

    Raises:
        StoreError: something else is there.
    """
    if out.is_dir():
        raise StoreError(f"--out {out} is a folder, not a file", "name a file with --out")
    if overwrite or not out.exists():
        return
    try:
        with open_regular(out) as file, Image.open(file, formats=["PNG"]) as opened:
            ours = opened.info.get("Software") == software
    except (OSError, FileError, ValueError, SyntaxError):
        ours = False
    if not ours:
        hint = "name another file with --out"
        raise StoreError(
            f"--out {out} is there and is no {noun}",
            hint if overwrite is None else f"--overwrite replaces it; or {hint}",
        )


def model_files(*models: str | None) -> list[Path]:
    """The files and folders that MODEL strings lead to: `net.pth`, `net.py:make`, `hf:DIR`."""
    forms = [
        Path(form)
        for text in filter(None, models)
        for form in (text, text.partition(":")[2], text.rpartition(":")[0])
        if form
    ]
    return [path for path in forms if path.is_file() or (path / "config.json").is_file()]


def _forms(path: Path, real_folder: Callable[[Path], str]) -> set[str]:
    """Where a path leads, and where it stands, if it is a link itself."""
    whole = path.absolute()
    place = Path(real_folder(whole.parent), whole.name)
    if whole.name == ".." or place.is_symlink():
        return {str(place), os.path.realpath(place)}
    return {str(place)}
