"""A run directory that is written.

An image's files are written into a hidden folder beside its final one, and moved there at once when
the manifest, the last of them, is in it: what has a manifest is complete. Nothing here
needs torch.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np

from featviz.errors import StoreError
from featviz.files.urls import Url
from featviz.records import Floats, Layer, Skip
from featviz.rundir import MANIFEST_FILE, RUN_FILE, SCHEMA_VERSION, STATS_FILE
from featviz.rundir.atomic import (
    BUFFER,
    NEW,
    atomic,
    opened,
    part_name,
    part_of,
    remove,
    remove_whole,
    reported,
)
from featviz.rundir.image import Manifest, read_image
from featviz.rundir.mirror import Mirror
from featviz.rundir.place import holds_run, is_own_name, walk
from featviz.rundir.schema import OPTIONAL, Capture, convert, read_json
from featviz.text import quoted, safe_name, safe_way
from featviz.version import __version__

__all__ = ["ImageFolder", "RunDirectory", "atomic", "write_json"]

_SHORT = 40
"""Bytes of an image's name in the names of its files, so that what follows is not cut off."""
_TRIES = 10
"""How often a hidden folder is made where another process removes the empty folder above it."""
_dump = partial(json.dumps, ensure_ascii=False, allow_nan=False)


class ImageFolder:
    """The folder of one image; a new one has an unguessable name until all is in it."""

    def __init__(self, run: RunDirectory, name: str, hidden: str | None = None) -> None:
        """`name` is relative to the run directory, with forward slashes; `hidden` that of a new
        folder."""
        self.run, self.name, self.path = run, name, run.root / name
        self._is_new = hidden is not None
        self._hidden = self.path if hidden is None else self.path.with_name(hidden)
        self._written: dict[str, dict[str, Any]] = {}

    def file(self, layer: Layer, name: str, image: str | None = None) -> str:
        """A layer's file, relative to this folder: `004_layer1.0.conv1/output.png`.

        Args:
            image: the image's name, for a file that tells all in its own name:
                `cat__004_layer1.0.conv1.png`, `cat__004_layer1.0.conv1.grad.png`.
        """
        place = f"{layer.index:03d}_{layer.name or layer.type}"
        if image is None:
            return f"{safe_name(place)}/{safe_name(name)}"
        stem = safe_name(PurePosixPath(image).stem).encode()[:_SHORT].decode(errors="ignore")
        kind, _, rest = name.partition(".")
        ending = rest if kind == "output" and "." not in rest else name
        return safe_name(f"{stem}__{place}.{ending}")

    @contextmanager
    def writing(self, relative: str) -> Iterator[BinaryIO]:
        """A new file of this folder, `name` or `folder/name`, in memory; when the block is left it
        is written at once, and its size and SHA-256 are noted (`sha256sum` checks it without
        featviz)."""
        content, layer = io.BytesIO(), relative.rpartition("/")[0]
        yield content
        data = content.getbuffer()
        digest = hashlib.sha256(data).hexdigest()
        try:
            with (
                reported(f"{self.path}/{relative}"),
                opened(self._hidden, self.run.root, make=False) as folder,
            ):
                if layer:
                    with suppress(FileExistsError):
                        os.mkdir(layer, dir_fd=folder)
                fd = os.open(relative, NEW, 0o666, dir_fd=folder)
                with os.fdopen(fd, "wb", BUFFER) as file:
                    file.write(data)
        except StoreError:
            self.run.check_place()  # says so, if the run was moved away
            raise
        self._written[relative] = {"file": relative, "bytes": len(data), "sha256": digest}

    def finish(self, manifest: Mapping[str, Any], stats: Mapping[str, Floats]) -> None:
        """Write the statistics, then the manifest, and give a new folder its name: from now on the
        image is complete."""
        with self.writing(STATS_FILE) as file:
            np.savez(file, **stats)  # type: ignore[arg-type]
        files = [row for _, row in sorted(self._written.items())]
        content = {"schema_version": SCHEMA_VERSION, **manifest, "files": files}
        with self.writing(MANIFEST_FILE) as file:
            file.write(as_json(content, sealed=True))
        if self._is_new:
            self.run.check_place()
            with reported(self.path), opened(self.path.parent, self.run.root, make=False) as above:
                try:
                    names = self._hidden.name, self.path.name
                    os.replace(*names, src_dir_fd=above, dst_dir_fd=above)
                except OSError as error:
                    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                        raise self._holds_others() from None
                    raise
            self._hidden = self.path

    @property
    def is_complete(self) -> bool:
        """Whether the manifest is there."""
        return (self.path / MANIFEST_FILE).is_file()

    def manifest(self) -> Manifest:
        """The manifest of a complete image, whose files are there and fit it."""
        return read_image(self.run.root, self.name).manifest

    def discard(self) -> None:
        """Remove what there is of an image; a StoreError where files of others are in its folder.

        What has its final name gets a hidden one first: killed here, this leaves no part of an
        image.
        """
        root, hidden = self.run.root, self._hidden
        if hidden == self.path:
            with reported(self.path), suppress(FileNotFoundError):
                with opened(self.path, root, make=False):
                    for inside, _ in walk(self.path):
                        if not is_own_name(inside) and not part_of(PurePosixPath(inside).name):
                            raise self._holds_others()
                with opened(self.path.parent, root, make=False) as above:
                    hidden = self.path.with_name(part_name(self.path.name))
                    os.replace(self.path.name, hidden.name, src_dir_fd=above, dst_dir_fd=above)
        remove_whole(hidden, root)

    def _holds_others(self) -> StoreError:
        words = f"{quoted(str(self.path))} holds files that featviz did not write"
        return StoreError(words, "move them away; --resume goes on")


class RunDirectory:
    """A run directory that is being written."""

    def __init__(self, root: Path, mirror: Url | None = None) -> None:
        """Make the folder where it is missing.

        Args:
            mirror: where a copy is kept in an object store.
        """
        self.root = root
        self._mirror = None if mirror is None else Mirror(mirror, root)
        with reported(root):
            root.mkdir(parents=True, exist_ok=True)
            self._began = root.stat()

    @property
    def complete(self) -> list[str]:
        """The folders that have an image's manifest, whatever run.json says."""
        found = [way.rpartition("/") for way, _ in walk(self.root)]
        there = [folder for folder, _, name in found if folder and name == MANIFEST_FILE]
        return [folder for folder in there if not any(map(part_of, folder.split("/")))]

    def record(self) -> dict[str, Any] | None:
        """The content of run.json; None where there is none of featviz."""
        return read_json(self.root / RUN_FILE) if holds_run(self.root) else None

    def before(self) -> tuple[list[str], dict[str, str]]:
        """The images that run.json names, and the errors of those that failed; nothing where it
        does not fit."""
        with suppress(StoreError, ValueError, KeyError):
            record = read_json(self.root / RUN_FILE)
            images = convert(record["images"], dict[str, int | list[str]])
            rows = convert(record["failures"], list[dict[str, str | int]])
            names = convert([*images["complete"], *images["missing"]], list[str])
            return names, {row["image"]: row["error"] for row in rows}
        return [], {}

    def image(self, name: str) -> ImageFolder:
        """The folder of the image with this relative name."""
        return ImageFolder(self, safe_way(name))

    def new_image(self, name: str) -> ImageFolder:
        """The folder of an image that is to be written, which gets its name when it is finished."""
        self.check_place()
        relative = safe_way(name)
        folder = ImageFolder(self, relative, part_name(relative.rpartition("/")[2]))
        with reported(folder.path):
            for left in reversed(range(_TRIES)):
                try:
                    with opened(folder.path.parent, self.root) as above:
                        os.mkdir(folder._hidden.name, dir_fd=above)
                    break
                except FileNotFoundError:  # another process has removed the empty folder above
                    if not left:
                        raise
        return folder

    def check_place(self) -> None:
        """Whether this is still the folder in which the run began."""
        with suppress(OSError):
            if os.path.samestat(self._began, self.root.stat()):
                return
        raise StoreError(
            f"{quoted(str(self.root))} was removed or renamed while the run wrote into it",
            "where it is now, --resume goes on with what is complete",
        )

    def clear_images(self, names: Iterable[str]) -> None:
        """Remove what killed runs left beside the folders of these images and run.json."""
        paths = {RUN_FILE, *map(safe_way, names)}
        for above in {PurePosixPath(path).parent for path in paths}:
            hidden = list[str]()
            # nothing behind a link is ours
            with suppress(OSError, StoreError), opened(self.root / above, self.root, False) as fd:
                named = [(entry.name, part_of(entry.name)) for entry in os.scandir(fd)]
                hidden = [name for name, of in named if of and str(above / of) in paths]
            for name in hidden:
                remove_whole(self.root / above / name, self.root)

    def clear(self, ours: Iterable[str]) -> None:
        """Remove an earlier run, image by image: killed here, this leaves no part of one."""
        for folder in self.complete:
            ImageFolder(self, folder).discard()
        remove(self.root, ours)

    def write_run(self, content: Mapping[str, Any]) -> None:
        """Write run.json, and bring the mirror up to date."""
        self.check_place()
        record = {"schema_version": SCHEMA_VERSION, **content}
        write_json(self.root / RUN_FILE, record, self.root)
        if self._mirror is not None:
            self._mirror.put_run(map(safe_way, content["images"]["complete"]))


def manifest_rows(captures: Sequence[Capture], skipped: Sequence[Skip]) -> dict[str, Any]:
    """`captures` and `skipped` as the manifest has them; optional fields only where set."""
    rows = []
    for capture in captures:
        row = {name: getattr(capture, name) for name in capture.__slots__}
        rows.append({k: v for k, v in row.items() if v is not None or k not in OPTIONAL})
    return {"captures": rows, "skipped": [vars(skip) for skip in skipped]}


def write_arrays(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """An npz file as `np.savez` writes it, which cannot take an array called `file`."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def write_record(
    folder: Path, name: str, content: Mapping[str, Any], files: Iterable[str] | None = None
) -> None:
    """Write the record of a result, as the last file of its folder. It lists the others, by which
    --overwrite knows what featviz wrote.

    Args:
        files: relative to the folder; None takes all that are in it.
    """
    names = [name for name, _ in walk(folder)] if files is None else files
    whole = {"schema_version": 1, "featviz": __version__, **content, "files": sorted(names)}
    write_json(folder / name, whole)


def write_json(path: Path, content: Mapping[str, Any], below: Path | None = None) -> None:
    """Write a JSON file, as `as_json` gives it."""
    with atomic(path, below) as file:
        file.write(as_json(content))


def as_json(content: Mapping[str, Any], sealed: bool = False) -> bytes:
    """JSON with a line for each entry and for each item of a list of objects, in a tenth of the
    time of `indent`; where it is `sealed` the last entry is the checksum of all before it."""
    entries = []
    for key, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(f"  {_dump(item)}" for item in value) + "\n ]"
        else:
            text = _dump(value)
        entries.append(f" {_dump(key)}: {text}")
    body = ("{\n" + ",\n".join(entries)).encode("utf-8", "backslashreplace")
    if sealed:
        body += f',\n "sha256": "{hashlib.sha256(body).hexdigest()}"'.encode()
    return body + b"\n}\n"
