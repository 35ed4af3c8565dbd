"""Writes run directories.

The files of an image are written into a hidden folder, the manifest last. Then the folder
gets its final name. So a folder with a manifest is complete. Nothing here needs torch."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from featviz.errors import StoreError
from featviz.files.urls import Url
from featviz.records import Floats, Layer, Skip
from featviz.rundir import MANIFEST_FILE, RUN_FILE, SCHEMA_VERSION, STATS_FILE
from featviz.rundir.folder import Folder, hidden_name, hides, is_hidden, reported
from featviz.rundir.image import Manifest, read_image
from featviz.rundir.locks import is_lock
from featviz.rundir.mirror import Mirror
from featviz.rundir.ownership import holds_run, is_own_name, walk
from featviz.rundir.read import read_record
from featviz.rundir.schema import OPTIONAL, Capture, read_json
from featviz.text import quoted, safe_name, safe_path
from featviz.version import __version__

_SHORT = 40
"""How many bytes of an image's name stand in the names of its files (--flat). With more,
the end of the names would be cut off."""
_TRIES = 10
"""How often `new_image` tries to make a folder, if another process removes the empty
folder above it."""
_dump = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


class ImageFolder:
    """The folder of one image; a new one has a hidden name until its manifest is
    written."""

    def __init__(self, run: RunDirectory, name: str, new: Folder | None = None) -> None:
        """Make the object; nothing is written or read yet.

        Args:
            name: the final path of the folder, relative to the run directory, with
                forward slashes; empty for `kernels`, whose files lie in the run
                directory itself.
            new: the open hidden folder of a new image; it is closed when it gets its
                final name. None for a folder that has its final name.
        """
        self.run = run
        self.name = name
        self.path = run.root / name
        self._above = name.rpartition("/")[0]
        """The parent folder, relative to the run directory; empty if the parent is the
        run directory."""
        self._new = new
        self._written: dict[str, dict[str, Any]] = {}
        """Rows of `files` of the manifest, by the paths of the files."""

    def file(self, layer: Layer, name: str, image: str | None = None) -> str:
        """The path of a layer's file in this folder: `004_layer1.0.conv1/output.png`.

        Args:
            name: the name of the file, such as `output.png`.
            image: the image's name, for --flat: then files lie directly in this folder,
                as `cat__004_layer1.0.conv1.png` for `output.png` and
                `cat__004_layer1.0.conv1.grad.png` for `grad.png`. None without --flat.
        """
        numbered = f"{layer.index:03d}_{layer.name or layer.type}"
        if image is None:
            return f"{safe_name(numbered)}/{safe_name(name)}"
        stem = (
            safe_name(PurePosixPath(image).stem)
            .encode()[:_SHORT]
            .decode(errors="ignore")
        )
        capture, _, rest = name.partition(".")
        ending = rest if capture == "output" and "." not in rest else name
        return safe_name(f"{stem}__{numbered}.{ending}")

    @contextmanager
    def writing(self, relative: str) -> Iterator[BinaryIO]:
        """Give the block a buffer in memory for the content of a new file. After the
        block, the content is written to the disk, and the file is listed in `files` of
        the manifest.

        Args:
            relative: the file's path in this folder, `name` or `folder/name`.

        Raises:
            StoreError: the file cannot be written, or the run directory was moved away.
        """
        # in memory, since the checksum needs the whole content
        content = io.BytesIO()
        yield content
        data = content.getbuffer()  # without a copy
        digest = hashlib.sha256(data).hexdigest()
        try:
            with reported(f"{self.path}/{relative}"):
                if self._new is not None:
                    file = self._new.create(relative)
                else:
                    path = f"{self.name}/{relative}".lstrip("/")
                    file = self.run.folder.create(path)
                with file:
                    file.write(data)
        except StoreError:
            # if the run directory was moved away, the message must say that instead
            self.run.check_place()
            raise
        self._written[relative] = {
            "file": relative,
            "bytes": len(data),
            "sha256": digest,
        }

    def finish(self, manifest: Mapping[str, Any], stats: Mapping[str, Floats]) -> None:
        """Write the statistics, then the manifest, and give a new folder its final name:
        then the image is complete.

        Args:
            manifest: the entries of the manifest but for `schema_version`, `files` and
                `sha256`.
            stats: the arrays of stats.npz, by key.

        Raises:
            StoreError: the final name is taken by a file or by a folder that is not
                empty, a file cannot be written, or the run directory was moved away.
        """
        with self.writing(STATS_FILE) as file:
            np.savez(file, **stats)  # type: ignore[arg-type]
        # Sorted, since encoders end in any order, and the same run must write the same
        # bytes.
        files = [row for _, row in sorted(self._written.items())]
        content = {"schema_version": SCHEMA_VERSION, **manifest, "files": files}
        with self.writing(MANIFEST_FILE) as file:
            file.write(json_bytes(content, sealed=True))
        # the files of kernels lie in the run directory, which is itself hidden
        if self._new is None:
            return
        self.run.check_place()
        with reported(self.path), self.run.folder.folder(self._above) as above:
            try:
                above.publish(self._new, self.path.name)
            except OSError as error:
                # the final name is taken
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise self._holds_others() from None
                raise
        self._new.close()
        self._new = None

    def manifest(self) -> Manifest:
        """Read a complete image back, and return its manifest; StoreError if a file does
        not fit the manifest."""
        return read_image(self.run.root, self.name).manifest

    def discard(self) -> None:
        """Remove the folder of the image, finished or not. A missing folder is no error.

        Raises:
            StoreError: the folder is a link, or holds files that featviz did not write.
        """
        with reported(self.path), suppress(FileNotFoundError):
            with self.run.folder.folder(self._above) as above:
                if self._new is None:
                    hidden = self._hide(above)
                else:
                    hidden = self._new.path.name
                    self._new.close()
            self.run.folder.remove(f"{self._above}/{hidden}".lstrip("/"))

    def _hide(self, above: Folder) -> str:
        """Give the folder of a complete image a hidden name, before it is removed: if
        this process is killed meanwhile, no half image is left under the final name.

        Args:
            above: the parent folder of the image's folder.

        Returns:
            The hidden name.

        Raises:
            StoreError: the folder is a link, or holds files that featviz did not write.
        """
        with above.folder(self.path.name):
            pass  # opening a link is an error
        # Files are recognised by their names, since no manifest lists the files that a
        # killed run has left.
        for path, _ in walk(self.path):
            if not is_own_name(path) and not is_hidden(PurePosixPath(path).name):
                raise self._holds_others()
        hidden = hidden_name(self.path.name)
        above.replace(self.path.name, hidden)
        return hidden

    def _holds_others(self) -> StoreError:
        """The error for a folder that also holds files that featviz did not write."""
        return StoreError(
            f"{quoted(self.path)} holds files that featviz did not write",
            "move them away; --resume goes on",
        )


class EarlierImages(NamedTuple):
    """The images that an earlier run.json names."""

    names: list[str]
    """The names of images that did not fail: complete ones, and those that the run had
    not come to."""
    errors: dict[str, str]
    """The messages of failed images, by name."""


class RunDirectory:
    """A run directory that is being written."""

    def __init__(self, folder: Folder, mirror: Url | None = None) -> None:
        """Make the object; nothing is written or read yet.

        Args:
            folder: the open run directory, empty or with an earlier run.
            mirror: the URL of a copy in an object store; None for no copy.
        """
        self.folder = folder
        self.root = folder.path
        self._mirror = None if mirror is None else Mirror(mirror, self.root)

    @property
    def complete(self) -> list[str]:
        """The folders of complete images, relative to the run directory; also of images
        that run.json does not name."""
        # A hidden folder with a manifest does not count: a process was killed before it
        # could rename the folder.
        complete = []
        for path, _ in walk(self.root):
            folder, _, name = path.rpartition("/")
            is_hidden_folder = any(map(is_hidden, folder.split("/")))
            if name == MANIFEST_FILE and folder and not is_hidden_folder:
                complete.append(folder)
        return complete

    def record(self) -> dict[str, Any] | None:
        """The content of run.json; None if there is no run.json that featviz wrote.

        Raises:
            StoreError: run.json has another version, or is too large.
        """
        if not holds_run(self.root):
            return None
        return read_json(self.root / RUN_FILE)

    def before(self) -> EarlierImages:
        """The images that run.json names; none if run.json is missing or does not fit."""
        with suppress(StoreError):
            record = read_record(self.root)
            names = [*record.images.complete, *record.images.missing]
            return EarlierImages(
                names, {row.image: row.error for row in record.failures}
            )
        return EarlierImages([], {})

    def is_complete(self, name: str) -> bool:
        """Whether an image is complete, by the name of the image."""
        return (self.root / safe_path(name) / MANIFEST_FILE).is_file()

    def image(self, name: str) -> ImageFolder:
        """The final folder of an image, by the name of the image. It need not exist."""
        return ImageFolder(self, safe_path(name))

    def new_image(self, name: str, tries: int = _TRIES) -> ImageFolder:
        """Make the hidden folder of an image that is to be written.

        Args:
            name: the name of the image.
            tries: how many attempts are left.

        Raises:
            StoreError: the folder cannot be made, or the run directory was moved away.
        """
        self.check_place()
        relative = safe_path(name)
        above, _, last = relative.rpartition("/")
        with reported(self.root / relative):
            try:
                with self.folder.folder(above, make=True) as folder:
                    return ImageFolder(self, relative, folder.new(hidden_name(last)))
            # another process may remove the empty folder above before this one uses it
            except FileNotFoundError:
                if tries == 1:
                    raise
                return self.new_image(name, tries - 1)

    def check_place(self) -> None:
        """Refuse to go on if the run directory is no longer at its path.

        Raises:
            StoreError: it was removed or renamed.
        """
        if not self.folder.is_in_place():
            raise StoreError(
                f"{quoted(self.root)} was removed or renamed while the run wrote"
                " into it",
                "where it is now, --resume goes on with what is complete",
            )

    def clear_images(self, names: Iterable[str]) -> None:
        """Remove the hidden files and folders that killed runs have left, for these images
        and for run.json. The caller must hold the lock of the run: then no other process
        writes these files.

        Args:
            names: the names of the images.
        """
        in_folders = defaultdict[str, list[str]](list)
        for path in (RUN_FILE, *map(safe_path, names)):
            above, _, name = path.rpartition("/")
            in_folders[above].append(name)
        for above, siblings in in_folders.items():
            # behind a link, or in a missing folder, featviz has left no files
            with suppress(OSError, StoreError), self.folder.folder(above) as folder:
                hidden = [e.name for e in folder.entries() if is_hidden(e.name)]
                for name in hidden:
                    if any(hides(name, sibling) for sibling in siblings):
                        self.folder.remove(f"{above}/{name}".lstrip("/"))

    def clear(self, ours: Iterable[str]) -> None:
        """Remove an earlier run image by image: if this process is killed meanwhile, it
        leaves no half image.

        Args:
            ours: the paths of all files in the run directory that featviz has written, in
                the order in which they are removed.

        Raises:
            StoreError: an image's folder also holds files that featviz did not write.
        """
        for name in self.complete:
            ImageFolder(self, name).discard()
        # what is left: run.json, reports, and images that were never complete
        self.folder.remove_files(ours)

    def write_run(self, content: Mapping[str, Any]) -> None:
        """Write run.json, and bring the mirror up to date.

        Args:
            content: the entries of run.json but for `schema_version`.

        Raises:
            StoreError: run.json or the mirror cannot be written, or the run directory was
                moved away.
        """
        # without this check, run.json would be written into a folder that was renamed,
        # since the folder is held by its descriptor
        self.check_place()
        write_json(self.folder, RUN_FILE, {"schema_version": SCHEMA_VERSION, **content})
        if self._mirror is not None:
            self._mirror.put_run(map(safe_path, content["images"]["complete"]))


def manifest_rows(
    captures: Sequence[Capture], skipped: Sequence[Skip]
) -> dict[str, Any]:
    """The entries `captures` and `skipped` of a manifest. An optional field of a capture
    that is None is left out."""
    rows = []
    for capture in captures:
        row = {}
        for name in capture.__slots__:
            value = getattr(capture, name)
            if value is not None or name not in OPTIONAL:
                row[name] = value
        rows.append(row)
    return {"captures": rows, "skipped": [vars(skip) for skip in skipped]}


def write_arrays(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an npz file, as `np.savez` does. `np.savez` itself takes arrays as keywords,
    and so cannot write an array with the name `file`.

    Args:
        file: the file, open for writing.
        arrays: the arrays, by name.
    """
    # force_zip64: an array may have more than 4 GB, and zipfile asks before it is written
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def write_record(
    folder: Folder,
    name: str,
    content: Mapping[str, Any],
    files: Iterable[str] | None = None,
) -> None:
    """Write the record of a result, as the last file of its folder. The record lists the
    other files, which --overwrite will remove.

    Args:
        folder: the folder of the result.
        name: the name of the record, such as audit.json.
        content: the entries of the record but for `schema_version`, `featviz` and
            `files`.
        files: the files to list, relative to the folder; None lists all files in it.
    """
    if files is None:
        files = [path for path, _ in walk(folder.path) if not is_lock(path)]
    record = {
        "schema_version": 1,
        "featviz": __version__,
        **content,
        "files": sorted(files),
    }
    write_json(folder, name, record)


def write_json(folder: Folder, name: str, content: Mapping[str, Any]) -> None:
    """Write a JSON file as `json_bytes` formats it; StoreError if it cannot be written."""
    with folder.write(name) as file:
        file.write(json_bytes(content))


def json_bytes(content: Mapping[str, Any], sealed: bool = False) -> bytes:
    """A JSON document that has a line for each entry, and for each item of a list of
    objects. This takes a tenth of the time of `json.dumps(indent=2)`.

    Args:
        content: the entries of the document.
        sealed: whether a last entry `sha256` is added: the checksum of all bytes before
            the comma that precedes it.
    """
    entries = []
    for key, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(f"  {_dump(item)}" for item in value) + "\n ]"
        else:
            text = _dump(value)
        entries.append(f" {_dump(key)}: {text}")
    # The name of a file may have bytes that are not UTF-8. Python holds them as
    # surrogates, which `backslashreplace` writes as JSON allows: \udcff.
    body = ("{\n" + ",\n".join(entries)).encode("utf-8", "backslashreplace")
    if sealed:
        body += f',\n "sha256": "{hashlib.sha256(body).hexdigest()}"'.encode()
    return body + b"\n}\n"
