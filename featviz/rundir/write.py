"""The run directory: names, atomic writes, manifests.

An image's files are written into a hidden folder beside its final one, and moved there at once when
the manifest, the last of them, is in it: what has a manifest is complete. Nothing here needs torch.
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
from typing import Any, BinaryIO, cast

import numpy as np

from featviz.errors import StoreError
from featviz.records import Floats, Layer, Skip
from featviz.rundir import MANIFEST_FILE, RUN_FILE, SCHEMA_VERSION, STATS_FILE
from featviz.rundir.atomic import (
    atomic,
    new_file,
    opened,
    part_name,
    part_of,
    refuse_links,
    remove,
    remove_empty,
    remove_folder,
    reported,
)
from featviz.rundir.image import read_image
from featviz.rundir.place import RUN, check_free, holds_run, left_of_image, walk
from featviz.rundir.read import image_folders, read_json
from featviz.rundir.schema import OPTIONAL, Capture, Manifest
from featviz.text import quoted, safe_name, safe_way
from featviz.version import __version__

__all__ = ["ImageFolder", "RunDirectory", "atomic", "write_json"]

_SHORT = 40
"""Bytes of an image's name in the names of its files, so that what follows is not cut off."""
_TRIES = 10
"""How often a hidden folder is made where another process removes the empty folder above it."""
_dump = partial(json.dumps, ensure_ascii=False, allow_nan=False)


class ImageFolder:
    """The folder of one image. A new one is written under an unguessable name beside its final one,
    and moved there when all is in it: under its final name it is whole."""

    def __init__(self, run: RunDirectory, name: str, new: bool = False) -> None:
        """Make a hidden folder for an image that is new.

        Args:
            name: the folder relative to the run directory, with forward slashes.
        """
        self.run, self.name, self.path, self.is_new = run, name, run.root / name, new
        self._written: dict[str, _SummedFile] = {}
        self._hidden = self.path.with_name(part_name(self.path.name)) if new else self.path
        with reported(self.path):
            for left in reversed(range(_TRIES if new else 0)):
                try:
                    with opened(self.path.parent, run.root) as above:
                        os.mkdir(self._hidden.name, dir_fd=above)
                    break
                except FileNotFoundError:  # another process has removed the empty folder above
                    if not left:
                        raise

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
        """Open a new file of this folder, `name` or `folder/name`, to be written from its beginning
        to its end; removed if the block fails. No link below the run is followed."""
        *folders, name = relative.split("/")
        parent = self._hidden.joinpath(*folders)
        try:
            with (
                reported(f"{self.path}/{relative}"),
                opened(parent, self.run.root, len(folders) if self.is_new else None) as place,
                new_file(place, name) as file,
            ):
                summed = _SummedFile(file)
                yield cast(BinaryIO, summed)
        except StoreError:
            self.run.check_place()  # says so, if the run was moved away
            raise
        self._written[relative] = summed

    def finish(self, manifest: Mapping[str, Any], stats: Mapping[str, Floats]) -> None:
        """Write the statistics, then the manifest, and give a new folder its name: from now on the
        image is complete."""
        with self.writing(STATS_FILE) as file:
            packed = io.BytesIO()
            write_arrays(packed, stats)
            file.write(packed.getvalue())
        files = [
            {"file": name, "bytes": one.count, "sha256": one.hash.hexdigest()}
            for name, one in sorted(self._written.items())
        ]
        content = {"schema_version": SCHEMA_VERSION, **manifest, "files": files}
        with self.writing(MANIFEST_FILE) as file:
            file.write(sealed(as_json(content)))
        if not self.is_new:
            return
        self.run.check_place()
        with reported(self.path), opened(self.path.parent, self.run.root, made=0) as above:
            try:
                names = self._hidden.name, self.path.name
                os.replace(*names, src_dir_fd=above, dst_dir_fd=above)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise self._holds_others() from None
                raise

    @property
    def is_complete(self) -> bool:
        """Whether the manifest is there."""
        return (self.path / MANIFEST_FILE).is_file()

    @property
    def size(self) -> int:
        """Bytes of its files."""
        with reported(self.path):
            return sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())

    def manifest(self) -> Manifest:
        """The manifest of a complete image, whose files are there and fit it."""
        return read_image(self.run.root, self.name).manifest

    def refuse_others(self) -> None:
        """Say before the work that files of others are in its place."""
        ours = {*left_of_image(self.run.root, self.name)}
        if not ours.issuperset(f"{self.name}/{inside}" for inside, _ in walk(self.path)):
            raise self._holds_others()

    def _holds_others(self) -> StoreError:
        words = f"{quoted(str(self.path))} holds files that featviz did not write"
        return StoreError(words, "move them away; --resume goes on")

    def discard(self) -> None:
        """Remove what was written of an image that failed, with folders that this empties.

        The manifest goes first: killed in between, this leaves an incomplete image. Files that
        have no name of ours stay.
        """
        if self.is_new:
            remove_folder(self._hidden, self.run.root)
        with reported(self.path):
            remove(self.run.root, left_of_image(self.run.root, self.name))
            remove_empty(self.path)


class RunDirectory:
    """A run directory that is being written."""

    kind = ImageFolder
    """The class of its images' folders."""

    def __init__(self, root: Path) -> None:
        """Note which folder it is."""
        self.root = root
        self._began: os.stat_result | None = None
        with suppress(OSError):
            self._began = root.stat()

    @classmethod
    def create(cls, root: Path) -> RunDirectory:
        """Make the folder where it is missing."""
        with reported(root):
            root.mkdir(parents=True, exist_ok=True)
        return cls(root)

    @property
    def complete(self) -> list[str]:
        """The folders that have an image's manifest, whatever run.json says."""
        found = image_folders(self.root) if self.root.is_dir() else ()
        return [path for path, lacks in found if lacks is None]

    def record(self) -> dict[str, Any] | None:
        """The content of run.json; None where there is none of featviz."""
        return read_json(self.root / RUN_FILE) if holds_run(self.root) else None

    def check_free(self) -> None:
        """Refuse a place that holds something else, or a run with complete images."""
        check_free(self.root, RUN, False)

    def refresh(self) -> None:
        """Look anew what is there: a folder is looked at whenever it is asked."""

    def image(self, name: str) -> ImageFolder:
        """The folder of the image with this relative name."""
        return self.kind(self, safe_way(name))

    def folder(self, relative: str) -> ImageFolder:
        """The folder of an image, by its path relative to the run directory."""
        return self.kind(self, relative)

    def new_image(self, name: str) -> ImageFolder:
        """The folder of the image with this relative name, to be written; there is none under its
        name until it is finished."""
        self.check_place()
        return self.kind(self, safe_way(name), new=True)

    def check_place(self) -> None:
        """Whether this is still the folder in which the run began."""
        if self._began is None:
            return
        with suppress(OSError):
            if os.path.samestat(self._began, self.root.stat()):
                return
        raise StoreError(
            f"{quoted(str(self.root))} was removed or renamed while the run wrote into it",
            "where it is now, --resume goes on with what is complete",
        )

    def clear_images(self, names: Iterable[str]) -> None:
        """Remove what killed runs left beside the folders of these images and run.json, and folders
        above that this empties."""
        paths = {RUN_FILE, *map(safe_way, names)}
        for above in {PurePosixPath(path).parent for path in paths}:
            if any((self.root / part).is_symlink() for part in (above, *above.parents)[:-1]):
                continue  # nothing behind a link is ours
            hidden: list[Path] = []
            with reported(self.root / above), suppress(FileNotFoundError, NotADirectoryError):
                named = ((path, part_of(path.name)) for path in (self.root / above).iterdir())
                hidden = [path for path, name in named if name and str(above / name) in paths]
            for path in hidden:
                if path.is_dir() and not path.is_symlink():
                    remove_folder(path, self.root)
                elif path.is_file():
                    remove(self.root, [str(above / path.name)])

    def refuse_links(self, names: Iterable[str]) -> None:
        """Say before the work that the folder of one of these images is, or is behind, a link."""
        refuse_links(self.root, map(safe_way, names))

    def write_run(self, content: Mapping[str, Any]) -> None:
        """Write run.json."""
        self.check_place()
        content = {"schema_version": SCHEMA_VERSION, **content}
        write_json(self.root / RUN_FILE, content, self.root)


class _SummedFile(io.RawIOBase):
    """A file that is written from its beginning to its end, and summed up meanwhile. It has no
    descriptor, by which numpy and Pillow would write past it, and cannot go back.

    SHA-256 (hashlib's, with the processor's own instructions) takes 0.5 ms a megabyte, in the
    threads that write. BLAKE3 would take a fifth of that, and a package more; `sha256sum` checks
    ours without featviz.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.hash, self.count = file, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.file.write(data)
        self.hash.update(data)
        count = memoryview(data).nbytes
        self.count += count
        return count


_END = b"\n}\n"
_SEAL = ',\n "sha256": "{}"\n}}\n'


def sealed(document: bytes) -> bytes:
    r"""A JSON object, with the checksum of all that stands before it as its last entry.

    Args:
        document: ends with `\n}\n`.
    """
    body = document.removesuffix(_END)
    return body + _SEAL.format(hashlib.sha256(body).hexdigest()).encode()


def is_sealed(document: bytes) -> bool:
    """Whether a document is as `sealed` made it, to the last bit."""
    length = len(_SEAL.format("0" * 64))
    return len(document) > length and sealed(document[:-length] + _END) == document


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


def as_json(content: Mapping[str, Any]) -> bytes:
    """JSON with a line for each entry and for each item of a list of objects.

    A tenth of the time of `indent`, for which the standard library leaves its C encoder, and a
    diff of two manifests still shows the captures that differ.
    """
    entries = []
    for key, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(f"  {_dump(item)}" for item in value) + "\n ]"
        else:
            text = _dump(value)
        entries.append(f" {_dump(key)}: {text}")
    return ("{\n" + ",\n".join(entries) + "\n}\n").encode("utf-8", "backslashreplace")
