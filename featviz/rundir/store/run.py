"""A run directory below a URL that is being written, image by image.

Each image is built in a folder of this machine, as in a run directory, and then uploaded: its
manifest last, so that what has a manifest is complete. Nothing here needs torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from featviz.errors import FileError, StoreError, UploadError
from featviz.files import parse_json
from featviz.records import Floats, Written
from featviz.rundir import MANIFEST_FILE, RUN_FILE, schema
from featviz.rundir.image import read_image
from featviz.rundir.ownership import is_record_of_run
from featviz.rundir.schema import MOST_RECORD, Manifest
from featviz.rundir.store.fetch import files_here
from featviz.rundir.store.listing import StoredTree
from featviz.rundir.store.objects import ObjectStore
from featviz.rundir.unlike import taken
from featviz.rundir.verify import faults_of
from featviz.rundir.write import ImageFolder, NewImageFolder, RunDirectory
from featviz.text import listed, quoted, safe_way


def record_of(store: ObjectStore, tree: StoredTree) -> dict[str, Any] | None:
    """The content of run.json; None where there is none of featviz."""
    size = tree.run_files.get(RUN_FILE, 0)
    with suppress(ValueError):
        content = parse_json(store.head(RUN_FILE, min(size, MOST_RECORD)).decode("utf-8"))
        if is_record_of_run(content):
            return dict(content)
    return None


def check_free(
    store: ObjectStore, tree: StoredTree, record: Mapping[str, Any], certain: bool
) -> None:
    """Refuse a place that holds something else, or a run with complete images.

    Args:
        record: what is known of the run that run.json will tell, to tell the same from another.
        certain: whether the record says all that makes a run the same.

    Raises:
        StoreError: there are such objects.
    """
    where, there = quoted(str(store.url)), [*tree.strangers, *tree.all]
    earlier = record_of(store, tree)
    if there and earlier is None:
        names = listed([quoted(name, 80) for name in sorted(there)], 3)
        raise StoreError(
            f"--out {where} is not empty and holds no run of featviz: {names}",
            "name another place with --out",
        )
    if earlier is not None and tree.complete:
        ways = "--out names another place"
        raise taken(where, earlier, len(tree.complete), record, certain, ways)


class StoredRun(RunDirectory):
    """A run directory below a URL that is being written."""

    def __init__(self, root: Path, store: ObjectStore) -> None:
        """Note where it is.

        Args:
            root: an empty folder of this machine, for files on their way.
        """
        super().__init__(root)
        self.store = store

    @cached_property
    def tree(self) -> StoredTree:
        """What is there: listed once, and from then on kept up to date by what this writes."""
        return StoredTree.of(self.store.sizes())

    def record(self) -> dict[str, Any] | None:
        """The content of run.json; None where there is none of featviz."""
        return record_of(self.store, self.tree)

    def was_drawn_by(self, fingerprint: str) -> bool:
        """Whether a complete image is of a run with this fingerprint."""
        for way in self.tree.complete:
            with suppress(StoreError):
                if self.folder(way).manifest().fingerprint == fingerprint:
                    return True
        return False

    def cleared(self) -> StoredRun:
        """Remove what an earlier run has left that has no complete image; run.json goes last."""
        self.store.remove(sorted(self.tree.all, key=lambda name: name == RUN_FILE))
        self.tree.images.clear()
        self.tree.run_files.clear()
        return self

    def folder(self, way: str) -> StoredFolder:
        """The folder of an image."""
        return StoredFolder(self, way)

    def new_image(self, name: str) -> NewStoredFolder:
        """The folder of the image with this relative name, to be written.

        Raises:
            StoreError: the folder for files on their way is gone.
        """
        self.check_place()
        return NewStoredFolder(self, safe_way(name))

    def clear_images(self, names: Iterable[str]) -> list[str]:
        """Remove what uploads have left that were ended too early, whatever the image.

        Returns:
            Nothing: all of it has names of ours.
        """
        for way in self.tree.images.keys() - set(self.tree.complete):
            self.folder(way).discard()
        return []

    def refuse_links(self, names: Iterable[str]) -> None:
        """Nothing: stores have no links."""

    def write_run(self, content: Mapping[str, Any]) -> None:
        """Write run.json, and upload it.

        Raises:
            UploadError: the store does not take it.
        """
        super().write_run(content)
        self._upload(RUN_FILE)

    def brought(self, name: str) -> Path:
        """A file of the run, which is brought here if it is there."""
        path = self.root / name
        size = self.tree.run_files.get(name)
        if size is not None and not path.exists():
            with path.open("xb") as file:
                file.writelines(self.store.pieces(name, min(size, MOST_RECORD)))
        return path

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Open a file of the run for writing; it is uploaded when the block has succeeded."""
        with super().writing(name) as file:
            yield file
        self._upload(name)

    def _upload(self, name: str) -> None:
        path = self.root / name
        _put(self.store, {name: path})
        self.tree.run_files[name] = path.stat().st_size


class StoredFolder(ImageFolder):
    """The folder of an image below a URL."""

    def __init__(self, run: StoredRun, name: str) -> None:
        super().__init__(run.root, name)
        self._run = run

    @property
    def _there(self) -> dict[str, int]:
        return self._run.tree.images.get(self.name, {})

    @property
    def is_complete(self) -> bool:
        """Whether the manifest is there."""
        return MANIFEST_FILE in self._there

    @property
    def size(self) -> Written:
        """Its files, and their bytes."""
        return Written(len(self._there), sum(self._there.values()))

    def manifest(self, verify: bool = False) -> Manifest:
        """The manifest, if all files that it lists are there with as many bytes.

        Args:
            verify: read all of them, and hold them against their checksums.

        Raises:
            StoreError: one does not fit.
        """
        if verify:
            sizes = {f"{self.name}/{name}": size for name, size in self._there.items()}
            with files_here(self._run.store, sizes) as root:
                image = read_image(root, self.name)
                for fault in faults_of(image):
                    raise StoreError(fault)
                return image.manifest
        size = self._there.get(MANIFEST_FILE, 0)
        name = f"{self.name}/{MANIFEST_FILE}"
        if size > MOST_RECORD:
            raise StoreError(f"{quoted(name)} has {size:,} bytes, more than it may have")
        with self._said():
            data = b"".join(self._run.store.pieces(name, size))
            manifest = schema.read_manifest(data)
        for row in manifest.files or ():
            if self._there.get(row.file) != row.bytes:
                raise StoreError(f"{quoted(f'{self.name}/{row.file}')} is not as it was written")
        return manifest

    @contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except (FileError, ValueError) as error:
            raise StoreError(f"{quoted(self.name)}/{MANIFEST_FILE}: {error}") from error

    def discard(self) -> None:
        """Remove what is there of an image that is not complete, or no longer wanted; the manifest
        goes first.

        Raises:
            StoreError: something cannot be removed.
        """
        if self._there:  # the manifest may be there though the answer to its upload was lost
            inside = [MANIFEST_FILE, *(self._there.keys() - {MANIFEST_FILE})]
            self._run.store.remove(f"{self.name}/{name}" for name in inside)
            self._run.tree.images.pop(self.name, None)


class NewStoredFolder(NewImageFolder):
    """The folder of an image that is being written here, and uploaded by `finish`."""

    def __init__(self, run: StoredRun, name: str) -> None:
        super().__init__(run, name)
        self._run, self._written = run, Written()

    def finish(self, manifest: Mapping[str, Any], stats: Mapping[str, Floats]) -> None:
        """Write the statistics and the manifest, upload all files, the manifest last, and remove
        them here.

        Raises:
            UploadError: the store does not take one of them.
        """
        super().finish(manifest, stats)
        images = self._run.tree.images
        images[self.name] = {name: found.bytes for name, found in self._sums.items()}
        for group in (sorted(self._sums), [MANIFEST_FILE]):
            _put(self._run.store, {f"{self.name}/{name}": self.path / name for name in group})
        self._written = ImageFolder(self.root, self.name).size
        # no other file of it is asked for from now on
        images[self.name] = {MANIFEST_FILE: (self.path / MANIFEST_FILE).stat().st_size}
        shutil.rmtree(self.path, ignore_errors=True)

    @property
    def size(self) -> Written:
        """Its files, and their bytes, once they are uploaded."""
        return self._written

    def discard(self) -> None:
        """Remove all that was written, here and as far as the store answers there: what stays has
        no manifest, or all of its files."""
        super().discard()
        with suppress(StoreError):
            self._run.folder(self.name).discard()


def _put(store: ObjectStore, files: Mapping[str, Path]) -> None:
    try:
        store.put(files)
    except StoreError as error:
        raise UploadError(error.message, error.hint) from error
