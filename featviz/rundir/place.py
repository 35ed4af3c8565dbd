"""Where a result is written: apart from what is read, in a hidden folder beside its
place, and in the place of an earlier result only if featviz wrote all that is there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from featviz.errors import StoreError, UsageError
from featviz.files import BY_DESCRIPTOR, real
from featviz.rundir import (
    AUDIT_FILE,
    DIFF_FILE,
    EXEMPLARS_FILE,
    LOCK_FILE,
    REPORT_RECORD,
    RUN_FILE,
)
from featviz.rundir.folder import (
    OLD,
    PART,
    Folder,
    hidden_name,
    hides,
    is_hidden,
    reported,
)
from featviz.rundir.locks import held, is_lock, locked, locked_new
from featviz.rundir.ownership import (
    JUNIT,
    PAGE,
    PRUNING,
    REPORT_ALONE,
    FileKind,
    is_events,
    is_of_kind,
    look,
    picture_of,
    record_of,
    walk,
)
from featviz.text import counted, listed, quoted

__all__ = [
    "AUDIT",
    "DIFF",
    "EXEMPLARS",
    "JUNIT",
    "PAGE",
    "PRUNING",
    "REPORT_ALONE",
    "REPORT_FOLDER",
    "RUN",
    "FileKind",
    "check_apart",
    "check_file",
    "check_free",
    "model_files",
    "picture_of",
    "replacing",
    "writing",
]

RUN = RUN_FILE
AUDIT = AUDIT_FILE
DIFF = DIFF_FILE
EXEMPLARS = EXEMPLARS_FILE
REPORT_FOLDER = REPORT_RECORD
"""Results that have a folder of their own, by the record which says that the folder is
ours, and lists the others."""


def check_free(root: Path, record_name: str, overwrite: bool) -> list[str] | None:
    """Say before the work that a folder cannot become the result's.

    Args:
        record_name: the file that is the result's record.

    Returns:
        The files of the earlier result, which is to be replaced; None where there is
        none.
    """
    if root.exists() and not root.is_dir():
        raise StoreError(
            f"--out {root} is a file, not a folder", "name another with --out"
        )
    record = record_of(root, record_name)
    if record is None:
        _check_empty(root, record_name)
        return None
    contents = look(root)
    if not overwrite and (contents.complete_images or record_name != RUN):
        hint = "--out names another folder, --overwrite replaces it"
        add = ("--overwrite",)
        if record_name == RUN and not record.kind:
            images = counted(contents.complete_images, "image")
            raise StoreError(
                f"--out {root} holds a run, {images} complete",
                f"`run --resume` goes on with it, {hint}",
                add=add,
            )
        raise StoreError(
            f"--out {root} holds an earlier result ({record_name})", hint, add=add
        )
    if contents.others:
        nearest = sorted(contents.others, key=lambda path: (path.count("/"), path))
        names = listed([quoted(path, 80) for path in nearest], 3)
        raise StoreError(
            f"--out {root} holds files that featviz did not write: {names}",
            "move them away, or name another folder with --out",
        )
    return contents.ours


def _check_empty(root: Path, record_name: str) -> None:
    """Refuse a folder that holds more than locks, events, and what killed commands
    left."""
    for path, _ in walk(root):
        if is_lock(path) or is_hidden(path.partition("/")[0]) or is_events(path):
            continue
        noun = record_name.removesuffix(".json")
        message = f"--out {root} is not empty and holds no {noun} of featviz"
        if (root / record_name).exists():
            message += f": its {record_name} is none that featviz wrote"
        raise StoreError(message, "name another folder with --out")


@contextmanager
def replacing(root: Path, record_name: str, overwrite: bool = True) -> Iterator[Folder]:
    """A hidden folder beside `root` to write into, which takes its place if the block
    succeeds: the result appears whole or not at all. Both are locked meanwhile, so that
    whoever comes to find one of them can tell whether it is being written.

    Args:
        record_name: the file that is the result's record.
        overwrite: False refuses to begin where `root` holds an earlier result.
    """
    final = real(root)
    with ExitStack() as locks:
        locks.enter_context(held(root))
        check_free(root, record_name, overwrite)
        with reported(root, "choose another place with --out, or make room"):
            above = Folder.open(final.parent)
            _clear_left_over(above, final, record_name)
            new = above.new(hidden_name(final.name))
            try:
                locks.enter_context(locked_new(new, f"--out {quoted(str(root))}"))
                yield new
                # the earlier result is looked for anew: the work before may have taken
                # hours
                earlier = check_free(final, record_name, True)
                # Windows renames no folder in which a file is open
                if not BY_DESCRIPTOR:
                    locks.close()
                _exchange(
                    above, new, final, look(final).ours if earlier is None else earlier
                )
            finally:
                above.remove(new.path.name)


def _exchange(above: Folder, new: Folder, final: Path, earlier: list[str]) -> None:
    """Let a new folder take the place of an earlier one, of which then these files are
    removed."""
    old_name = hidden_name(final.name, OLD)
    is_replaced = final.exists()
    if is_replaced:
        above.replace(final.name, old_name)
    try:
        above.publish(new, final.name)
    except BaseException:
        if is_replaced:
            above.replace(old_name, final.name)
        raise
    published = above.child(final.name)
    published.remove(LOCK_FILE)
    if is_replaced:
        _bring_events(above.child(old_name), published)
        remove_result(above, old_name, earlier)


def _bring_events(old: Folder, new: Folder) -> None:
    """TensorBoard goes on with its files: they stay where they are."""
    for path, _ in walk(old.path):
        if is_events(path):
            new.take(old, path)


def remove_result(above: Folder, name: str, files: Iterable[str]) -> None:
    """Remove these files of a folder, and the folder if nothing else is in it."""
    with above.folder(name) as folder:
        folder.remove_files([LOCK_FILE, *files])
    above.remove_empty(name)


def _clear_left_over(above: Folder, final: Path, record_name: str) -> None:
    """Remove what killed processes have left beside a folder: those that were to take
    its place, and what is ours in those that have stood there, if their result is there
    again or was replaced. A process that still runs holds the lock of its own."""
    for entry in above.entries():
        if not hides(entry.name, final.name) or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            with locked(above.path / entry.name / LOCK_FILE, quoted(entry.name)):
                pass
        except StoreError:
            continue
        if entry.name.endswith(PART):
            above.remove(entry.name)
        elif record_of(final, record_name) is not None:
            with suppress(StoreError):
                remove_result(above, entry.name, look(above.path / entry.name).ours)


def check_file(
    out: Path, kind: FileKind, option: str = "--out", overwrite: bool = False
) -> None:
    """Refuse a place that holds something else than an earlier file of the same kind."""
    if out.is_dir():
        raise StoreError(
            f"{option} {out} is a folder, not a file", f"name a file with {option}"
        )
    if not overwrite and out.exists() and not is_of_kind(out, kind):
        raise StoreError(
            f"{option} {out} is there and is no {kind.description}",
            f"name another file with {option}, or replace it with --overwrite",
            add=("--overwrite",),
        )


@contextmanager
def writing(
    out: Path, kind: FileKind, option: str = "--out", overwrite: bool = False
) -> Iterator[BinaryIO]:
    """Write a file of a kind, which takes its place when all is written."""
    check_file(out, kind, option, overwrite)
    with write_file(out) as file:
        yield file


@contextmanager
def write_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file, which takes its place when all is written. Folders that are missing
    are made, and a link in the file's place is replaced."""
    with reported(path):
        folder = Folder.open(path.parent)
    with folder, folder.write(path.name) as file:
        yield file


def check_apart(out: Path, option: str, inputs: Iterable[Path]) -> None:
    """Refuse to write where an input is: over it, or into a folder that holds it."""
    destination = os.path.realpath(out)
    within = destination.rstrip(os.sep) + os.sep
    real_folder = cache(os.path.realpath)  # of 10,000 images there are few
    for path in inputs:
        absolute = path.absolute()
        stands = Path(real_folder(absolute.parent), absolute.name)
        paths = {str(stands)}
        if absolute.name == ".." or stands.is_symlink():  # where it leads, too
            paths.add(os.path.realpath(stands))
        if any(text == destination or text.startswith(within) for text in paths):
            verb = "is" if destination in paths else "holds"
            raise UsageError(
                f"{option} {quoted(str(out))} {verb} the input {quoted(str(path))}",
                f"name another place with {option}",
            )


def model_files(*models: str | None) -> list[Path]:
    """The files and folders that MODEL strings lead to: `net.pth`, `net.py:make`,
    `hf:DIR`."""
    paths: list[Path] = []
    for text in filter(None, models):
        before, _, _ = text.rpartition(":")
        _, _, behind = text.partition(":")
        paths += [Path(part) for part in (text, behind, before) if part]
    return [
        path for path in paths if path.is_file() or (path / "config.json").is_file()
    ]
