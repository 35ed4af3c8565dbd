"""The run directory: names, atomic writes, manifests.

Every file is written beside its final name and moved there, and an image's manifest is written
last, so what has a manifest is complete. Nothing here needs torch.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from featviz.errors import StoreError
from featviz.files import real
from featviz.records import Capture, Floats, Layer, Skip, Written
from featviz.rundir import atomic as writing
from featviz.rundir import ownership
from featviz.rundir.atomic import atomic, reported
from featviz.rundir.ownership import BASES_FILE, MANIFEST_FILE, RUN_FILE, STATS_FILE, Claim
from featviz.text import quoted, safe_name, safe_way

__all__ = [
    "BASES_FILE",
    "MANIFEST_FILE",
    "RUN_FILE",
    "STATS_FILE",
    "ImageFolder",
    "RunDirectory",
    "atomic",
    "write_json",
]

SCHEMA_VERSION = 1
"""Of run.json and manifest.json. 1: first release."""

OPTIONAL = ("channels", "slices", "tensor", "collapsed", "reduce", "overlay", "figure")
"""Fields of a row of `captures` that are there only where they have a value."""

ROOM = "run"
"""In the hidden folder beside an archive: the run that it will hold."""

_BUFFER = 2**20
"""Bytes that are copied into an archive at a time."""

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can hold: no time of ours is in it."""


class RunDirectory:
    """A run directory that is being written."""

    def __init__(self, root: Path) -> None:
        self.root = root

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
            root.mkdir(parents=True, exist_ok=True)
        return cls(root).cleared()

    def cleared(self) -> RunDirectory:
        """Remove what killed runs left of files that were being written into the root."""
        names = [path.name for path in self.root.iterdir() if path.is_file()]
        own = (RUN_FILE, BASES_FILE)
        writing.remove(self.root, [name for name in names if writing.part_of(name) in own])
        return self

    def image(self, name: str) -> ImageFolder:
        """The folder of the image with this relative name."""
        return ImageFolder(self.root, safe_way(name))

    def refuse_links(self, names: Iterable[str]) -> None:
        """Say before the work that the folder of one of these images is a link, or lies behind one.

        Raises:
            StoreError: names the link.
        """
        writing.refuse_links(self.root, map(safe_way, names))

    def write_run(self, content: Mapping[str, Any]) -> None:
        """Write run.json."""
        content = {"schema_version": SCHEMA_VERSION, **content}
        write_json(self.root / RUN_FILE, content, self.root)


class ImageFolder:
    """The folder of one image."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        """The run directory, and relative to it, with forward slashes, the folder."""
        self.path = root / name

    def file(self, layer: Layer, name: str) -> str:
        """A layer's file, relative to this folder: `004_layer1.0.conv1/output.png`."""
        folder = safe_name(f"{layer.index:03d}_{layer.name or layer.type}")
        return f"{folder}/{safe_name(name)}"

    @contextmanager
    def writing(self, relative: str) -> Iterator[BinaryIO]:
        """Open a file of this folder for atomic writing, through no link below the run."""
        with atomic(self.path / relative, self.root) as file:
            yield file

    def finish(self, manifest: Mapping[str, Any], stats: Mapping[str, Floats]) -> None:
        """Write the statistics, then the manifest: from now on the image is complete."""
        with self.writing(STATS_FILE) as file:
            write_arrays(file, stats)
        content = {"schema_version": SCHEMA_VERSION, **manifest}
        write_json(self.path / MANIFEST_FILE, content, self.root)

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
            writing.remove(self.root, ownership.left_of_image(self.root, self.name))
            writing.remove_empty(self.path)


def check_archive(archive: Path, overwrite: bool) -> None:
    """Say before the work that a run cannot become this file.

    Raises:
        StoreError: there is such a file already, and it is not to be replaced or holds no run.
    """
    if not archive.exists():
        return
    if not overwrite:
        raise StoreError(f"--archive {archive} exists", "--overwrite replaces a run in a zip file")
    if not ownership.is_archive_of_run(archive):
        raise StoreError(
            f"--archive {archive} exists and holds no run of featviz",
            "name another file with --archive",
        )


def room_for_archive(archive: Path, overwrite: bool) -> Path:
    """Make a hidden folder beside an archive for the run that it will hold, and return it.

    What a killed run left there is removed.

    Raises:
        StoreError: there is such an archive already, or the folder cannot be made.
    """
    check_archive(archive, overwrite)
    with reported(archive):
        place = archive.absolute().parent
        place.mkdir(parents=True, exist_ok=True)
        for path in place.iterdir():
            if writing.part_of(path.name) == archive.name:
                _clear_room(path)
        room = place / writing.part_name(archive.name)
        room.mkdir()
    return room


def _clear_room(room: Path) -> None:
    """Remove a killed run from the hidden folder in which it was to become an archive; a folder in
    which there is anything else stays."""
    with suppress(StoreError, OSError):
        earlier = None if room.is_symlink() else ownership.of_run(room / ROOM)
        if earlier is not None:
            writing.remove(room / ROOM, earlier.files())
            writing.remove_empty(room)


def pack(root: Path, archive: Path) -> None:
    """Pack a folder into a zip file; the same content gives the same bytes.

    Pictures are compressed already and stored as they are.

    Raises:
        StoreError: it cannot be written.
    """
    with atomic(archive) as file, zipfile.ZipFile(file, "w") as packed:
        for path in sorted(path for path in root.rglob("*") if path.is_file()):
            name = path.relative_to(root).as_posix()
            info = zipfile.ZipInfo(name, _EPOCH)
            text = path.suffix in (".json", ".npz", ".npy")
            info.compress_type = zipfile.ZIP_DEFLATED if text else zipfile.ZIP_STORED
            info.external_attr = 0o644 << 16
            info.file_size = (
                path.stat().st_size
            )  # tells whether it takes the fields for large files
            with path.open("rb") as source, packed.open(info, "w") as target:
                shutil.copyfileobj(source, target, _BUFFER)


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
    if root.exists() and not root.is_dir():
        raise StoreError(f"--out {root} is a file, not a folder", "name another with --out")
    if not root.is_dir() or _is_free(root, besides):
        return None
    earlier = ownership.of_run(root)
    if earlier is None:
        written = (root / RUN_FILE).exists()
        raise StoreError(
            f"--out {root} is not empty and holds no run of featviz"
            + (f": its {RUN_FILE} is none that featviz wrote" if written else ""),
            "name another folder with --out",
        )
    if earlier.complete and not overwrite:
        raise _taken(root, earlier, record, certain)
    earlier.check(besides)
    return earlier


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """In words, what of two records is not the same; options come first."""
    return sorted(_differences(old, new, where), key=lambda words: "options" not in words)


def _differences(old: Any, new: Any, where: str) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        at = [(f"{where}.{k}" if where else k, old.get(k), new.get(k)) for k in keys]
        return [words for name, a, b in at for words in _differences(a, b, name)]
    return [] if old == new else [f"its {where} is {_short(old)}, this one's {_short(new)}"]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return quoted(text if len(text) <= 60 else f"{text[:57]}...")


def _taken(
    root: Path, earlier: Claim, record: Mapping[str, Any] | None, certain: bool
) -> StoreError:
    """The refusal of a folder that holds a run with complete images."""
    ways = "--overwrite replaces it, --out names another folder"
    if record is None or "kind" in record or "kind" in earlier.record:
        return StoreError(f"--out {root} holds another run", ways)
    plain = json.loads(json.dumps(record, default=str))
    if found := differences(_common(earlier.record, plain), plain):
        return StoreError(
            f"--out {root} holds another run; {found[0]}", f"{ways}; --resume takes the same run"
        )
    name = "the same run" if certain else "a run with the same options"
    count = f"{earlier.complete} image{'s' if earlier.complete > 1 else ''} complete"
    return StoreError(f"--out {root} holds {name}, {count}", f"--resume goes on with it, {ways}")


def _common(old: Any, new: Any) -> Any:
    """Of a record what the other one speaks of, too."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return old
    return {key: _common(old[key], new[key]) for key in old if key in new}


def _is_free(root: Path, besides: Collection[Path]) -> bool:
    """Whether a folder holds nothing but what this command will write itself."""
    apart = {real(path) for path in besides}
    own = (RUN_FILE, BASES_FILE)
    return all(writing.part_of(path.name) in own or real(path) in apart for path in root.iterdir())


def _empty(earlier: Claim, besides: Collection[Path]) -> None:
    """Remove a run: manifests first and run.json last, so that what is left of it when this is
    killed neither passes for complete nor for something else."""
    ways = earlier.files(besides)
    if earlier.unlisted:  # without their manifests nothing else would know of these images
        images = {**earlier.record["images"], "complete": []}
        names = [*earlier.record["images"]["complete"], *images.get("missing", [])]
        images["missing"] = [*names, *earlier.unlisted]
        write_json(earlier.root / RUN_FILE, {**earlier.record, "images": images}, earlier.root)
    writing.remove(earlier.root, ways)


def write_arrays(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """An npz file as `np.savez` writes it, which cannot take an array called `file`."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def write_json(path: Path, content: Mapping[str, Any], below: Path | None = None) -> None:
    """Write JSON with a line for each entry and for each item of a list of objects.

    A tenth of the time of `indent`, for which the standard library leaves its C encoder, and a
    diff of two manifests still shows the captures that differ.
    """
    entries = ",\n".join(f" {_dump(key)}: {_value(value)}" for key, value in content.items())
    with atomic(path, below) as file:
        file.write(f"{{\n{entries}\n}}\n".encode("utf-8", "backslashreplace"))


def _value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"  {_dump(item)}" for item in value) + "\n ]"
    return _dump(value)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
