"""Where a result may be written. A result may not replace an input, and may replace an
earlier result only if featviz wrote all files of it. The new result is written into a
hidden folder in the same parent folder, and renamed at the end."""

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
from featviz.rundir.locks import end_lock, held, is_lock, locked_new
from featviz.rundir.ownership import (
    JUNIT,
    PAGE,
    PRUNING,
    REPORT_ALONE,
    FileKind,
    WrittenRun,
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
"""The records of results that have a folder of their own: each says that the folder is
ours, and lists the other files in it."""


def check_free(root: Path, record_name: str, overwrite: bool) -> list[str] | None:
    """Refuse a folder that a result cannot be written into, before any work.

    Args:
        root: the folder, which need not exist.
        record_name: the file that is the result's record.
        overwrite: whether an earlier result may be replaced.

    Returns:
        The files of the earlier result, in the order in which they are to be removed;
        None if there is no earlier result.

    Raises:
        StoreError: `root` is a file, or holds what featviz did not write, or an earlier
            result without `overwrite`. An earlier run without any picture is no error.
    """
    if root.exists() and not root.is_dir():
        raise StoreError(
            f"--out {root} is a file, not a folder", "name another with --out"
        )
    # without a record of featviz, no file counts as written by featviz
    record = record_of(root, record_name)
    if record is None:
        _check_empty(root, record_name)
        return None
    contents = look(root)
    # after a run that drew nothing, people correct the command and repeat it
    if not overwrite and (contents.drawn_images or record_name != RUN):
        hint = "--out names another folder, --overwrite replaces it"
        result = f"an earlier result ({record_name})"
        if isinstance(record, WrittenRun):
            result = f"a run, {counted(contents.drawn_images, 'image')} complete"
            hint = f"`run --resume` goes on with it, {hint}"
        raise StoreError(f"--out {root} holds {result}", hint, add=("--overwrite",))
    if contents.others:
        # the files nearest to the top say best what the folder is
        nearest = sorted(contents.others, key=lambda path: (path.count("/"), path))
        names = listed([quoted(path, 80) for path in nearest], 3)
        raise StoreError(
            f"--out {root} holds files that featviz did not write: {names}",
            "move them away, or name another folder with --out",
        )
    return contents.ours


def _check_empty(root: Path, record_name: str) -> None:
    """Refuse a folder that is not empty. Locks, TensorBoard's events and the hidden files
    of killed commands do not count.

    Args:
        record_name: the record of the result that is to be written, for the message.

    Raises:
        StoreError: the folder holds any other file.
    """
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
    """Make a hidden folder for the block to write into. If the block succeeds, the folder
    is renamed to `root`, and an earlier result there is removed: the new result appears
    complete or not at all.

    Args:
        root: where the result will be; folders above it are made.
        record_name: the file that is the result's record.
        overwrite: whether an earlier result may be replaced.

    Raises:
        StoreError: `check_free` refuses `root`, before or after the block; another
            process holds a lock; or the folder cannot be made or renamed.
    """
    final = real(root)
    with ExitStack() as locks:
        # Both folders are locked, so that other processes see of each that it is being
        # written.
        locks.enter_context(held(root))
        check_free(root, record_name, overwrite)
        with (
            reported(root, "choose another place with --out, or make room"),
            Folder.open(final.parent) as above,
        ):
            _clear_left_over(above, final, record_name)
            new = above.new(hidden_name(final.name))
            try:
                locks.enter_context(locked_new(new, f"--out {quoted(root)}"))
                yield new
                # checked once more, since the block may have taken hours
                earlier = check_free(final, record_name, True)
                if earlier is None:  # there may be files that killed commands left
                    earlier = look(final).ours
                # Windows renames no folder in which a file is open
                if not BY_DESCRIPTOR:
                    locks.close()
                _exchange(above, new, final, earlier)
            finally:
                new.close()
                above.remove(new.path.name)


def _exchange(above: Folder, new: Folder, final: Path, earlier: list[str]) -> None:
    """Rename a new folder to its final path, and remove an earlier folder that had this
    path.

    Args:
        above: the parent folder of both.
        new: the new folder, which has a hidden name.
        final: the final path of the new folder.
        earlier: the files of the earlier folder to remove. TensorBoard's events move to
            the new folder. If other files are left, the earlier folder stays, under a
            hidden name.
    """
    old_name = hidden_name(final.name, OLD)
    is_replaced = final.exists()
    # If this process is killed between the two renames, `locks.held` gives the earlier
    # result its name back.
    if is_replaced:
        above.replace(final.name, old_name)
    try:
        above.publish(new, final.name)
    except BaseException:
        if is_replaced:
            above.replace(old_name, final.name)
        raise
    # opened anew: on Windows a folder is its path, which has changed
    with above.child(final.name) as published:
        published.remove(LOCK_FILE)
        if not is_replaced:
            return
        with above.child(old_name) as old:
            # other programs may still append to these files
            for path in filter(is_events, [path for path, _ in walk(old.path)]):
                published.move_from(old, path)
    remove_result(above, old_name, earlier)


def remove_result(above: Folder, name: str, files: Iterable[str]) -> None:
    """Remove the files of an earlier result, and its folder if it is empty then.

    Args:
        above: the parent folder of the result's folder.
        name: the name of the result's folder.
        files: the files to remove, as paths in the result's folder.
    """
    # no record lists the lock file, so it is removed here
    with above.folder(name) as folder:
        folder.remove_files([LOCK_FILE, *files])
    above.remove_empty(name)


def _clear_left_over(above: Folder, final: Path, record_name: str) -> None:
    """Remove the hidden folders that killed processes have left: unfinished results for
    the path `final`, and earlier results that had this path. What cannot be removed
    stays, without an error.

    Args:
        above: the parent folder of `final`.
        final: the path of the result.
        record_name: the file that is the result's record.
    """
    for entry in above.entries():
        # a hidden name says which path its folder is for
        if not hides(entry.name, final.name) or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            end_lock(above.path / entry.name / LOCK_FILE, quoted(entry.name))
        except StoreError:  # its process still runs
            continue
        if entry.name.endswith(PART):
            above.remove(entry.name)
        # without a result at `final`, this may be the only copy of the earlier result
        elif record_of(final, record_name) is not None:
            with suppress(StoreError):
                remove_result(above, entry.name, look(above.path / entry.name).ours)


def check_file(
    out: Path, file_kind: FileKind, option: str = "--out", overwrite: bool = False
) -> None:
    """Refuse to write a file where something else is. An earlier file of the same kind may
    be replaced.

    Args:
        out: the file, which need not exist.
        file_kind: the kind of the file that is to be written.
        option: the option that names the file, for messages.
        overwrite: whether a file of any kind may be replaced; a folder never is.

    Raises:
        StoreError: `out` is a folder, or a file of another kind without `overwrite`.
    """
    if out.is_dir():
        raise StoreError(
            f"{option} {out} is a folder, not a file", f"name a file with {option}"
        )
    if not overwrite and out.exists() and not is_of_kind(out, file_kind):
        raise StoreError(
            f"{option} {out} is there and is no {file_kind.description}",
            f"name another file with {option}, or replace it with --overwrite",
            add=("--overwrite",),
        )


@contextmanager
def writing(
    out: Path, file_kind: FileKind, option: str = "--out", overwrite: bool = False
) -> Iterator[BinaryIO]:
    """Check the file by `check_file`, which has the same parameters, and open it for the
    block to write. The file gets its name if the block succeeds.

    Raises:
        StoreError: `check_file` refuses the file, or it cannot be written.
    """
    check_file(out, file_kind, option, overwrite)
    with write_file(out) as file:
        yield file


@contextmanager
def write_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for the block to write. The file gets its name if the block succeeds;
    an earlier file, or a link, of that name is replaced. Missing folders are made.

    Raises:
        StoreError: the file cannot be written.
    """
    with reported(path):
        folder = Folder.open(path.parent)
    with folder, folder.write(path.name) as file:
        yield file


def check_apart(out: Path, option: str, inputs: Iterable[Path]) -> None:
    """Refuse a destination that is an input, or a folder that holds one.

    Args:
        out: the file or folder that is to be written.
        option: the option that names `out`, for the message.
        inputs: files or folders, which need not exist.

    Raises:
        UsageError: the message names the first such input.
    """
    destination = os.path.realpath(out)
    within = destination.rstrip(os.sep) + os.sep
    # 10,000 images are in few folders, so only the folders are resolved, each once
    real_folder = cache(os.path.realpath)
    for path in inputs:
        absolute = path.absolute()
        # the folder `x/..` does not lie in `x`, so it is resolved as a whole
        if absolute.name == "..":
            absolute = real(absolute)
        at_folder = Path(real_folder(absolute.parent), absolute.name)
        # neither a link nor the file that it leads to may be replaced
        paths = {str(at_folder)}
        if at_folder.is_symlink():
            paths.add(os.path.realpath(at_folder))
        if any(text == destination or text.startswith(within) for text in paths):
            verb = "is" if destination in paths else "holds"
            raise UsageError(
                f"{option} {quoted(out)} {verb} the input {quoted(path)}",
                f"name another place with {option}",
            )


def model_files(*models: str | None) -> list[Path]:
    """The files of models, and the folders with a config.json, that MODEL strings name.
    Only those that exist are returned.

    Args:
        models: MODEL strings such as `net.pth`, `net.py:make`, `hf:DIR`. None, and the
            name of a library's model, lead to no file.
    """
    paths = []
    for text in filter(None, models):
        # any part of the text may be the path: those that exist are returned
        before, _, _ = text.rpartition(":")
        _, _, behind = text.partition(":")
        paths += [Path(name) for name in (text, behind, before) if name]
    return [
        path for path in paths if path.is_file() or (path / "config.json").is_file()
    ]
