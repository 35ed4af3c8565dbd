"""Where a result is written: apart from what is read, in a hidden folder beside its place, and in
the place of an earlier one only if that may go."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from featviz.errors import StoreError, UsageError
from featviz.files import real
from featviz.rundir import (
    AUDIT_FILE,
    DIFF_FILE,
    EXEMPLARS_FILE,
    INDEX_FILE,
    LOCK_FILE,
    RUN_FILE,
    lock,
)
from featviz.rundir.atomic import part_name, part_of, remove, remove_empty, reported
from featviz.rundir.ownership import (
    Claim,
    is_lock,
    of_audit,
    of_diff,
    of_exemplars,
    of_report,
    of_run,
)
from featviz.text import quoted

_PART, _OLD = ".part", ".old"
"""Ends of the hidden names of a folder that is to stand in a place, and of one that has stood
there."""


@dataclass(frozen=True)
class ResultKind:
    """A kind of result that has a folder of its own."""

    noun: str
    mark: str
    claim_of: Callable[[Path], Claim | None]
    """The result that a folder holds; None where there is none of featviz."""

    def earlier(self, root: Path, besides: Collection[Path], words: str) -> Claim | None:
        """The result that a folder holds; None where it holds nothing but what this command will
        write itself, locks, and records that were being written when their command was killed.

        Raises:
            StoreError: it holds something else, which `words` tell.
        """
        apart = {real(path) for path in besides}
        if not root.is_dir() or all(
            part_of(path.name) == self.mark or real(path) in apart or is_lock(path.name)
            for path in root.iterdir()
        ):
            return None
        claim = self.claim_of(root)
        if claim is None:
            raise StoreError(f"--out {root} {words}", "name another folder with --out")
        return claim


RUN = ResultKind("run", RUN_FILE, of_run)
AUDIT = ResultKind("audit", AUDIT_FILE, of_audit)
DIFF = ResultKind("diff", DIFF_FILE, of_diff)
EXEMPLARS = ResultKind("exemplars", EXEMPLARS_FILE, of_exemplars)
REPORT_FOLDER = ResultKind("report", INDEX_FILE, of_report)


def _holds_another(root: Path, earlier: Claim) -> StoreError:
    ways = "--overwrite replaces it, --out names another folder"
    return StoreError(f"--out {root} holds another result", ways)


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
    words = f"is not empty and holds no {kind.noun} of featviz"
    if (root / kind.mark).exists():
        words += f": its {kind.mark} is none that featviz wrote"
    earlier = kind.earlier(root, besides, words)
    if earlier is not None:
        if earlier.is_complete and not overwrite:
            raise taken(root, earlier)
        earlier.files(besides)
    return earlier


@contextmanager
def replacing(root: Path, kind: ResultKind, besides: Collection[Path] = ()) -> Iterator[Path]:
    """A folder beside `root` to write into, which takes its place if the block succeeds: the result
    appears whole or not at all. Meanwhile `root` is locked.

    Raises:
        StoreError: it cannot be made, written into or moved, another process writes it, or `root`
            has come to hold something that featviz did not write; names `root`.
    """
    fresh = _beside(root)
    try:
        with lock.held(root), reported(root, "choose another place with --out, or make room"):
            clear_beside(root, kind)
            fresh.mkdir(parents=True)
            yield fresh
            put_in_place(fresh, root, kind, besides)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def place_beside(root: Path) -> Path | None:
    """A hidden name for a run that is to take the place of the one in a folder, which this process
    holds.

    None where no folder can be put in its place: it is a mounted disk, or the folder above it
    cannot be written.
    """
    final = real(root)
    return None if final.is_mount() or not os.access(final.parent, os.W_OK) else _beside(root)


def _beside(root: Path) -> Path:
    return real(root).with_name(part_name(real(root).name))


def clear_beside(root: Path, kind: ResultKind) -> None:
    """Remove the hidden folders that killed processes have left beside a folder, which this process
    holds: those that were to take its place, and what is ours in those that have stood there."""
    final = real(root)
    short = part_of(part_name(final.name))
    for path in final.parent.iterdir():
        stem, suffix = path.name.removesuffix(path.suffix), path.suffix
        if suffix not in (_PART, _OLD) or part_of(stem + _PART) != short:
            continue
        if path.is_symlink() or not path.is_dir():
            continue
        if suffix == _PART:
            shutil.rmtree(path, ignore_errors=True)
            continue
        with suppress(StoreError):
            if (left := kind.claim_of(path)) is not None:
                remove(path, [LOCK_FILE, *left.files()])
            remove_empty(path)


def put_in_place(fresh: Path, root: Path, kind: ResultKind, besides: Collection[Path] = ()) -> None:
    """Put a finished folder in the place of an earlier result, which is removed. That is looked for
    anew: the work before may have taken hours.

    Raises:
        StoreError: something that featviz did not write has come to be there.
        OSError: it cannot be moved; then the earlier result stays.
    """
    final, old = real(root), fresh.with_suffix(_OLD)
    words = "has come to hold files that featviz did not write"
    earlier = kind.earlier(final, besides, words)
    ways = [] if earlier is None else earlier.files(besides)
    if final.exists():
        final.replace(old)
    try:
        fresh.replace(final)
    except OSError:
        if old.exists():
            old.replace(final)
        raise
    for path in besides:  # what this command has yet to write, or goes on with
        way = os.path.relpath(os.path.realpath(path), final)
        if not way.startswith(os.pardir) and (old / way).is_file():
            (final / way).parent.mkdir(parents=True, exist_ok=True)
            (old / way).replace(final / way)
    remove(old, [LOCK_FILE, *ways])
    remove_empty(old)


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
        whole = path.absolute()
        stands = Path(real_folder(whole.parent), whole.name)
        forms = {str(stands)}
        if whole.name == ".." or stands.is_symlink():  # where it leads, too
            forms.add(os.path.realpath(stands))
        if any(form == place or form.startswith(within) for form in forms):
            what = "is" if place in forms else "holds"
            raise UsageError(
                f"{option} {quoted(str(out))} {what} the input {quoted(str(path))}",
                f"name another place with {option}",
            )


def model_files(*models: str | None) -> list[Path]:
    """The files and folders that MODEL strings lead to: `net.pth`, `net.py:make`, `hf:DIR`."""
    texts = list(filter(None, models))
    forms = [Path(f) for t in texts for f in (t, t.partition(":")[2], t.rpartition(":")[0]) if f]
    return [path for path in forms if path.is_file() or (path / "config.json").is_file()]
