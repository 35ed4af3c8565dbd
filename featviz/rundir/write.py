"""A run directory that is written.

An image's files are written into a hidden folder beside its final one. The manifest is
the last of them; then the folder gets its name. So a folder with a manifest is complete.
Nothing here needs torch."""

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
"""Bytes of an image's name in the names of its files, so that what follows is not cut
off."""
_TRIES = 10
"""How often a hidden folder is made where another process removes the empty folder
above it."""
_dump = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


class ImageFolder:
    """The folder of one image; a new one has a hidden name until its manifest is
    written."""

    def __init__(self, run: RunDirectory, name: str, new: Folder | None = None) -> None:
        """Make the object; nothing is written or read yet.

        Args:
            name: of the folder, relative to the run directory, with forward slashes;
                empty for `kernels`, whose files lie in the run directory itself.
            new: the hidden folder of a new image, which will get this name, and is
                closed then; None for a folder that has its name.
        """
        self.run = run
        self.name = name
        self.path = run.root / name
        self._above = name.rpartition("/")[0]
        """The folder above, relative to the run directory; empty for that itself."""
        self._new = new
        self._written: dict[str, dict[str, Any]] = {}
        """Rows of `files` of the manifest, by the paths of the files."""

    def file(self, layer: Layer, name: str, image: str | None = None) -> str:
        """The path of a layer's file in this folder: `004_layer1.0.conv1/output.png`.

        Args:
            name: of the file of the capture: `output.png`.
            image: the image's name (--flat); then the file lies in this folder itself,
                and its name says all: `cat__004_layer1.0.conv1.png` for `output.png`,
                `cat__004_layer1.0.conv1.grad.png` for `grad.png`.
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
        """Let the block write the content of a new file into memory. Afterwards it is
        written to the disk, and a row of the manifest's `files` is made for it.

        Args:
            relative: the file's path in this folder, `name` or `folder/name`.

        Raises:
            StoreError: it cannot be written, or the run directory was moved away.
        """
        # the checksum, which `sha256sum` checks as well, needs all of the content
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
            # where the run was moved away, that is the better message
            self.run.check_place()
            raise
        self._written[relative] = {
            "file": relative,
            "bytes": len(data),
            "sha256": digest,
        }

    def finish(self, manifest: Mapping[str, Any], stats: Mapping[str, Floats]) -> None:
        """Write the statistics, then the manifest, and give a new folder its name: from
        now on the image is complete.

        Args:
            manifest: its entries but for `schema_version`, `files` and `sha256`.
            stats: the arrays of stats.npz, by key.

        Raises:
            StoreError: something else has come to stand under its name, a file cannot
                be written, or the run directory was moved away.
        """
        with self.writing(STATS_FILE) as file:
            np.savez(file, **stats)  # type: ignore[arg-type]
        # encoders end in any order, and the same run is to write the same bytes
        files = [row for _, row in sorted(self._written.items())]
        content = {"schema_version": SCHEMA_VERSION, **manifest, "files": files}
        with self.writing(MANIFEST_FILE) as file:
            file.write(json_bytes(content, sealed=True))
        # kernels are written into a folder that is itself hidden
        if self._new is None:
            return
        self.run.check_place()
        with reported(self.path), self.run.folder.folder(self._above) as above:
            try:
                above.publish(self._new, self.path.name)
            except OSError as error:
                # a folder with files, or a file, has come to stand there
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    raise self._holds_others() from None
                raise
        self._new.close()
        self._new = None

    def manifest(self) -> Manifest:
        """Read a complete image back, and return its manifest; StoreError where its files
        do not fit that."""
        return read_image(self.run.root, self.name).manifest

    def discard(self) -> None:
        """Remove the folder of the image, finished or not; nothing where it is missing.

        Raises:
            StoreError: it also holds files that featviz did not write.
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
        """Rename the folder of a complete image before it is removed: a process that is
        killed meanwhile then leaves no part of an image under its name.

        Args:
            above: the folder that the image's folder is in.

        Returns:
            The hidden name.

        Raises:
            StoreError: the folder is a link, or holds files that featviz did not write.
        """
        with above.folder(self.path.name):
            pass  # a link is refused
        # Files are known by their names: those that a killed run has left are in no
        # manifest.
        for path, _ in walk(self.path):
            if not is_own_name(path) and not is_hidden(PurePosixPath(path).name):
                raise self._holds_others()
        hidden = hidden_name(self.path.name)
        above.replace(self.path.name, hidden)
        return hidden

    def _holds_others(self) -> StoreError:
        """The error for a folder with files that featviz did not write, which stay."""
        return StoreError(
            f"{quoted(self.path)} holds files that featviz did not write",
            "move them away; --resume goes on",
        )


class EarlierImages(NamedTuple):
    """What a run.json says of the images of its run."""

    names: list[str]
    """Images that are complete, or that the run had not come to."""
    errors: dict[str, str]
    """The messages of images that failed, by name."""


class RunDirectory:
    """A run directory that is being written."""

    def __init__(self, folder: Folder, mirror: Url | None = None) -> None:
        """Go on with what the folder holds.

        Args:
            folder: the open run directory.
            mirror: where a copy is kept in an object store; None for no copy.
        """
        self.folder = folder
        self.root = folder.path
        self._mirror = None if mirror is None else Mirror(mirror, self.root)

    @property
    def complete(self) -> list[str]:
        """The folders of complete images, relative to the run directory, whether or not
        run.json names them."""
        # a process that was killed between the manifest and the rename leaves a hidden
        # folder with a manifest
        complete = []
        for path, _ in walk(self.root):
            folder, _, name = path.rpartition("/")
            is_hidden_folder = any(map(is_hidden, folder.split("/")))
            if name == MANIFEST_FILE and folder and not is_hidden_folder:
                complete.append(folder)
        return complete

    def record(self) -> dict[str, Any] | None:
        """The content of run.json; None where there is no run.json of featviz.

        Raises:
            StoreError: it is of another version, or too large.
        """
        if not holds_run(self.root):
            return None
        return read_json(self.root / RUN_FILE)

    def before(self) -> EarlierImages:
        """The images that run.json names; none where it is missing or does not fit."""
        with suppress(StoreError):
            record = read_record(self.root)
            names = [*record.images.complete, *record.images.missing]
            return EarlierImages(
                names, {row.image: row.error for row in record.failures}
            )
        return EarlierImages([], {})

    def is_complete(self, name: str) -> bool:
        """Whether an image is complete; `name` is that of the image, not of its folder."""
        return (self.root / safe_path(name) / MANIFEST_FILE).is_file()

    def image(self, name: str) -> ImageFolder:
        """The folder of an image that is complete, by the name of the image."""
        return ImageFolder(self, safe_path(name))

    def new_image(self, name: str, tries: int = _TRIES) -> ImageFolder:
        """Make the hidden folder of an image that is to be written.

        Args:
            name: of the image.
            tries: how many attempts are left.

        Raises:
            StoreError: it cannot be made, or the run directory was moved away.
        """
        self.check_place()
        relative = safe_path(name)
        above, _, last = relative.rpartition("/")
        with reported(self.root / relative):
            try:
                with self.folder.folder(above, make=True) as folder:
                    return ImageFolder(self, relative, folder.new(hidden_name(last)))
            # between two calls, another process may remove the empty folder above
            except FileNotFoundError:
                if tries == 1:
                    raise
                return self.new_image(name, tries - 1)

    def check_place(self) -> None:
        """Refuse to go on where this is no longer the folder in which the run began.

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
        """Remove the hidden files and folders that killed runs have left of these images
        and of run.json. The caller holds the lock of the run, so no other process writes
        them.

        Args:
            names: of images.
        """
        in_folders = defaultdict[str, list[str]](list)
        for path in (RUN_FILE, *map(safe_path, names)):
            above, _, name = path.rpartition("/")
            in_folders[above].append(name)
        for above, siblings in in_folders.items():
            # a link on the way, or a missing folder: nothing there is ours
            with suppress(OSError, StoreError), self.folder.folder(above) as folder:
                hidden = [e.name for e in folder.entries() if is_hidden(e.name)]
                for name in hidden:
                    if any(hides(name, sibling) for sibling in siblings):
                        self.folder.remove(f"{above}/{name}".lstrip("/"))

    def clear(self, ours: Iterable[str]) -> None:
        """Remove an earlier run image by image, so that a process that is killed leaves no
        part of one.

        Args:
            ours: paths of all files in the run directory that featviz has written, in
                the order in which they are removed.

        Raises:
            StoreError: an image's folder also holds files of others.
        """
        for name in self.complete:
            ImageFolder(self, name).discard()
        # what is left: run.json, reports, and images that were never complete
        self.folder.remove_files(ours)

    def write_run(self, content: Mapping[str, Any]) -> None:
        """Write run.json, and bring the mirror up to date.

        Args:
            content: its entries but for `schema_version`.

        Raises:
            StoreError: one of them cannot be written, or the run directory was moved
                away.
        """
        # the descriptor follows a folder that was renamed, and nobody would look there
        self.check_place()
        write_json(self.folder, RUN_FILE, {"schema_version": SCHEMA_VERSION, **content})
        if self._mirror is not None:
            self._mirror.put_run(map(safe_path, content["images"]["complete"]))


def manifest_rows(
    captures: Sequence[Capture], skipped: Sequence[Skip]
) -> dict[str, Any]:
    """The entries `captures` and `skipped` of a manifest. A row has an optional field
    only where it is set."""
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
    """Write an npz file as `np.savez` does. That function takes arrays as keywords, so
    it takes none with the name `file`.

    Args:
        file: open for writing.
        arrays: by name.
    """
    # force_zip64: an array may have more than 4 GB, which zipfile does not know before
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
    """Write the record of a result, as the last file of its folder. It lists the other
    files: --overwrite removes these.

    Args:
        name: of the record, such as audit.json.
        content: its entries but for `schema_version`, `featviz` and `files`.
        files: that are listed, relative to the folder; None for all that are in it.
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
    """Write a JSON file as `json_bytes` formats it; StoreError where it cannot be."""
    with folder.write(name) as file:
        file.write(json_bytes(content))


def json_bytes(content: Mapping[str, Any], sealed: bool = False) -> bytes:
    """A JSON document with a line for each entry, and for each item of a list of objects.
    This takes a tenth of the time of `json.dumps(indent=2)`.

    Args:
        sealed: add a last entry `sha256`, the checksum of all bytes before the comma
            ahead of it.
    """
    entries = []
    for key, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(f"  {_dump(item)}" for item in value) + "\n ]"
        else:
            text = _dump(value)
        entries.append(f" {_dump(key)}: {text}")
    # The name of a file may have bytes that are not UTF-8, which Python holds as
    # surrogates. `backslashreplace` writes them as JSON writes any character: \udcff.
    body = ("{\n" + ",\n".join(entries)).encode("utf-8", "backslashreplace")
    if sealed:
        body += f',\n "sha256": "{hashlib.sha256(body).hexdigest()}"'.encode()
    return body + b"\n}\n"
