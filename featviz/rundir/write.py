"""The run directory: names, atomic writes, manifests.

An image's files are written into a hidden folder beside its final one, and moved there at once when
the manifest, the last of them, is in it: what has a manifest is complete. Nothing here needs torch.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np

from featviz.errors import StoreError
from featviz.records import Capture, Floats, Layer, Skip, Written
from featviz.rundir import MANIFEST_FILE, RUN_FILE, STATS_FILE, destination, ownership
from featviz.rundir.atomic import (
    HiddenFolder,
    atomic,
    folder_part_of,
    part_of,
    refuse_links,
    remove,
    remove_above,
    remove_empty,
    reported,
)
from featviz.rundir.ownership import Claim
from featviz.rundir.sums import Sum, SummedFile, sealed
from featviz.rundir.unlike import taken
from featviz.text import quoted, safe_name, safe_way

__all__ = ["ImageFolder", "RunDirectory", "atomic", "write_json"]

SCHEMA_VERSION = 2
"""The version of run.json and manifest.json. 1: first release. 2: a manifest has `files`, the sizes
and checksums of all others of the image, and ends with `sha256`, the checksum of itself."""

OPTIONAL = {
    *(
        "channels",
        "slices",
        "steps",
        "constant",
        "tensor",
        "collapsed",
        "reduce",
        "overlay",
        "figure",
    ),
}
"""Fields of a row of `captures` that are there only where they have a value."""


_SHORT = 40
"""Bytes of an image's name in the names of its files, so that what follows is not cut off."""


class RunDirectory:
    """A run directory that is being written."""

    def __init__(self, root: Path, durable: bool = False) -> None:
        """Note which folder it is.

        Args:
            durable: an image gets its name when the disk has its files.
        """
        self.root, self.durable = root, durable
        self._identity = _identity(root)

    @classmethod
    def create(
        cls,
        root: Path,
        overwrite: bool = False,
        record: Mapping[str, Any] | None = None,
        besides: Collection[Path] = (),
    ) -> RunDirectory:
        """Make the folder, or empty the run that it holds: where `overwrite` says so, or where
        none of its images is complete.

        Args:
            record: what run.json will say, to tell the same run from another.
            besides: files that the user has named for this command to write.

        Raises:
            StoreError: it holds another run, or something that featviz did not write, or cannot be
                written.
        """
        with reported(root):
            earlier = check_free(root, overwrite, record, besides)
            if earlier is not None:
                _empty(earlier, besides)
                cls(root).clear_images(ownership.names_of_images(earlier.record))
            root.mkdir(parents=True, exist_ok=True)
        return cls(root).cleared()

    def cleared(self) -> RunDirectory:
        """Remove what killed runs left of files that were being written into the root."""
        names = [path.name for path in self.root.iterdir() if path.is_file()]
        remove(self.root, [name for name in names if part_of(name) in destination.RUN.parts])
        return self

    def image(self, name: str) -> ImageFolder:
        """The folder of the image with this relative name."""
        return self.folder(safe_way(name))

    def folder(self, way: str) -> ImageFolder:
        """The folder of an image, by its way relative to the run directory."""
        return ImageFolder(self.root, way)

    def new_image(self, name: str) -> NewImageFolder:
        """The folder of the image with this relative name, to be written.

        Raises:
            StoreError: it cannot be made, or the run directory is no longer there.
        """
        self.check_place()
        return NewImageFolder(self, safe_way(name))

    def check_place(self) -> None:
        """Whether this is still the folder in which the run began.

        Raises:
            StoreError: it was removed or renamed.
        """
        if self._identity is not None and _identity(self.root) != self._identity:
            raise StoreError(
                f"{quoted(str(self.root))} was removed or renamed while the run wrote into it",
                "where it is now, --resume goes on with what is complete",
            )

    def clear_images(self, names: Iterable[str]) -> list[str]:
        """Remove the hidden folders that killed runs left beside those of these images, and folders
        above that this empties.

        Returns:
            Those that stay, relative to the run directory, with forward slashes: there are files in
            them that have no name of ours.

        Raises:
            StoreError: one cannot be removed; names the folder in which it is.
        """
        ways = {safe_way(name) for name in names}
        hidden = [way for above in _parents(ways) for way in self._hidden(above, ways)]
        for way in hidden:
            remove(self.root, ownership.left_of_image(self.root, way))
            remove_empty(self.root / way)
            remove_above(self.root / way, self.root)
        return sorted(way for way in hidden if (self.root / way).exists())

    def _hidden(self, above: PurePosixPath, ways: Collection[str]) -> list[str]:
        """The hidden folders in one folder that were to become one of these; none behind a link."""
        if any((self.root / part).is_symlink() for part in (above, *above.parents)[:-1]):
            return []
        with reported(self.root / above), suppress(FileNotFoundError, NotADirectoryError):
            meant = {path: folder_part_of(path.name) for path in (self.root / above).iterdir()}
            hidden = [path for path, name in meant.items() if name and str(above / name) in ways]
            return [
                str(above / path.name) for path in hidden if path.is_dir() and not path.is_symlink()
            ]
        return []

    def refuse_links(self, names: Iterable[str]) -> None:
        """Say before the work that the folder of one of these images is a link, or lies behind one.

        Raises:
            StoreError: names the link.
        """
        refuse_links(self.root, map(safe_way, names))

    def brought(self, name: str) -> Path:
        """Where a file of the run (`bases.npz`) can be read, if there is one."""
        return self.root / name

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Open a file of the run (`bases.npz`) for writing, atomically."""
        with atomic(self.root / name, self.root) as file:
            yield file

    def write_run(self, content: Mapping[str, Any]) -> None:
        """Write run.json.

        Raises:
            StoreError: it cannot be written, or the run directory is no longer there.
        """
        self.check_place()
        content = {"schema_version": SCHEMA_VERSION, **content}
        write_json(self.root / RUN_FILE, content, self.root, self.durable)


class ImageFolder:
    """The folder of one image."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        """The run directory, and relative to it, with forward slashes, the folder."""
        self.path = root / name
        self._sums: dict[str, Sum] = {}
        """Of the files that were written."""

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
        """Open a file of this folder for writing from its beginning to its end: atomically, and
        through no link below the run."""
        with self._opened(relative) as file:
            summed = SummedFile(file)
            yield summed.as_file()
        self._sums[relative] = summed.sum

    def _opened(self, relative: str) -> AbstractContextManager[BinaryIO]:
        return atomic(self.path / relative, self.root)

    def finish(self, manifest: Mapping[str, Any], stats: Mapping[str, Floats]) -> None:
        """Write the statistics, then the manifest: from now on the image is complete."""
        with self.writing(STATS_FILE) as file:
            packed = io.BytesIO()
            write_arrays(packed, stats)
            file.write(packed.getvalue())
        files = [{"file": name, **found._asdict()} for name, found in sorted(self._sums.items())]
        content = {"schema_version": SCHEMA_VERSION, **manifest, "files": files}
        with self._opened(MANIFEST_FILE) as file:
            file.write(sealed(_json(content)))

    @property
    def is_complete(self) -> bool:
        """Whether the manifest is there."""
        return (self.path / MANIFEST_FILE).is_file()

    @property
    def size(self) -> Written:
        """Its files, and their bytes."""
        with reported(self.path):
            sizes = [path.stat().st_size for path in self.path.rglob("*") if path.is_file()]
        return Written(len(sizes), sum(sizes))

    def discard(self) -> None:
        """Remove what was written of an image that failed, with folders that this empties.

        The manifest goes first: killed in between, this leaves an incomplete image. Files that
        have no name of ours stay.
        """
        with reported(self.path):
            remove(self.root, ownership.left_of_image(self.root, self.name))
            remove_empty(self.path)


class NewImageFolder(ImageFolder):
    """The folder of an image that is being written; there is none under its name until `finish`."""

    def __init__(self, store: RunDirectory, name: str) -> None:
        super().__init__(store.root, name)
        self._store = store
        self._hidden = HiddenFolder(self.path, store.root, store.durable)

    def _opened(self, relative: str) -> AbstractContextManager[BinaryIO]:
        return self._hidden.writing(relative)

    def finish(self, manifest: Mapping[str, Any], stats: Mapping[str, Floats]) -> None:
        """Write the statistics and the manifest, and give the folder its name."""
        super().finish(manifest, stats)
        self._store.check_place()
        self._hidden.publish(MANIFEST_FILE)

    def discard(self) -> None:
        """Remove all that was written."""
        self._hidden.discard()
        super().discard()


def _identity(folder: Path) -> tuple[int, int] | None:
    """The device and the number of a folder; None where there is none."""
    with suppress(OSError):
        found = folder.stat()
        return found.st_dev, found.st_ino
    return None


def manifest_rows(captures: Sequence[Capture], skipped: Sequence[Skip]) -> dict[str, Any]:
    """`captures` and `skipped` as the manifest has them; optional fields only where set."""
    rows = [
        {
            name: value
            for name, value in vars(capture).items()
            if name not in OPTIONAL or value is not None
        }
        for capture in captures
    ]
    return {"captures": rows, "skipped": [vars(skip) for skip in skipped]}


def check_free(
    root: Path,
    overwrite: bool,
    record: Mapping[str, Any] | None = None,
    besides: Collection[Path] = (),
    certain: bool = True,
) -> Claim | None:
    """Say before the work that a folder cannot become a run's.

    Args:
        record: what is known of the run that run.json will tell, to tell the same from another.
        besides: files that the user has named for this command to write.
        certain: whether the record says all that makes a run the same.

    Returns:
        The run of which the folder is to be emptied; None where there is none.

    Raises:
        StoreError: it is a file, holds another run, or something that featviz did not write.
    """
    taken = partial(_taken, record=record, certain=certain)
    return destination.check_free(root, destination.RUN, overwrite, besides, taken)


def _taken(
    root: Path, earlier: Claim, record: Mapping[str, Any] | None, certain: bool
) -> StoreError:
    """The refusal of a folder that holds a run with complete images."""
    ways = "--overwrite replaces it, --out names another folder"
    return taken(str(root), earlier.record, earlier.complete, record, certain, ways)


def _parents(ways: Iterable[str]) -> set[PurePosixPath]:
    return {PurePosixPath(way).parent for way in ways}


def _empty(earlier: Claim, besides: Collection[Path]) -> None:
    """Remove a run: manifests first and run.json last, so that what is left of it when this is
    killed neither passes for complete nor for something else."""
    ways = earlier.files(besides)
    if earlier.unlisted:  # without their manifests nothing else would know of these images
        images = {**earlier.record["images"], "complete": []}
        names = [*earlier.record["images"]["complete"], *images.get("missing", [])]
        images["missing"] = [*names, *earlier.unlisted]
        write_json(earlier.root / RUN_FILE, {**earlier.record, "images": images}, earlier.root)
    remove(earlier.root, ways)


def write_arrays(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """An npz file as `np.savez` writes it, which cannot take an array called `file`."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def write_json(
    path: Path, content: Mapping[str, Any], below: Path | None = None, durable: bool = False
) -> None:
    """Write JSON with a line for each entry and for each item of a list of objects.

    A tenth of the time of `indent`, for which the standard library leaves its C encoder, and a
    diff of two manifests still shows the captures that differ.
    """
    with atomic(path, below, durable) as file:
        file.write(_json(content))


def _json(content: Mapping[str, Any]) -> bytes:
    entries = ",\n".join(f" {_dump(key)}: {_value(value)}" for key, value in content.items())
    return f"{{\n{entries}\n}}\n".encode("utf-8", "backslashreplace")


def _value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"  {_dump(item)}" for item in value) + "\n ]"
    return _dump(value)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
