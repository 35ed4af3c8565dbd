"""Which files of a folder featviz wrote: what `--overwrite` may remove, and what stops it.

A folder is ours if our record in it parses and says what our writers always say; a file is ours if
that record, or the manifest of one of its images, lists it. An image's hidden folder, and its
folder without a manifest (up to 0.1.0), were being written when their run was killed: in them those
files are ours that have the names that featviz gives. Nothing here needs torch.

Records are not held against `schema`: a run of which one field does not fit, or that a later
featviz wrote, cannot be shown, but its owner must be able to replace it. So each field is looked at
by itself, and only fields that name files or images count.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from featviz import files
from featviz.errors import FileError, StoreError
from featviz.files import Folder
from featviz.records import FORMATS, KINDS
from featviz.rundir import (
    AUDIT_FILE,
    BASES_FILE,
    DIFF_FILE,
    DIFF_GRIDS,
    EXEMPLARS_FILE,
    INDEX_FILE,
    INPUT_FILE,
    LOCK_FILE,
    MANIFEST_FILE,
    MODELS_FILE,
    REPORT,
    REPORT_ASSETS,
    REPORT_FILE,
    REPORT_ZIP,
    RUN_FILE,
    SERIES_ASSETS,
    STATS_FILE,
    atomic,
)
from featviz.text import listed, quoted, safe_name, safe_way

GENERATOR = b'<meta name="generator" content="featviz'
"""Stands at the beginning of every page of a report."""

_HEAD = 1000
"""Bytes of a page in which its generator stands."""
_LARGEST = 2**28
"""Bytes of a record: a manifest has about 500 for a picture."""
_SHOWN = 3
"""Foreign files that a message names."""

_LAYER_FILE = re.compile(
    rf"(\d{{3,}}_[^/]+/({'|'.join([*KINDS, 'kernel'])})([.-][^/]*)?|[^/]+__\d{{3,}}_[^/]+)"
    rf"\.({'|'.join(FORMATS)}|npy)"
)
"""A file of a layer in an image's folder: the only names that a manifest can list."""
_IMAGE_FILES = (MANIFEST_FILE, STATS_FILE, INPUT_FILE)
"""Files in the folder of each image."""
_EXEMPLAR_FILE = re.compile(r"\d{3,}_[^/]+/[^/]+(/[^/]+){0,2}\.png")
_SUSPECTS_FILE = re.compile(r"suspects/[^/]+\.png")
_REPORT_FILE = re.compile(r"(image|layer)-\d+\.(html|js)|index\.(html|js)|grids-\d+-\d+\.js")
_SCRIPT = b"window.FEATVIZ"

Owns = Callable[[str], bool]
"""Whether a file, by its way relative to the folder, with forward slashes, was written by us."""


@dataclass(frozen=True)
class Claim:
    """A result of featviz in a folder, as its own record tells it."""

    root: Path
    record: Mapping[str, Any]
    owns: Owns
    complete: int = 1
    """Images that are whole; 0 where replacing it loses nothing."""
    first: tuple[str, ...] = ()
    """Files that go first when it is removed: without them nothing looks complete."""
    last: str = ""
    """The record, which goes last: until then the rest is known to be ours."""
    unlisted: tuple[str, ...] = ()
    """Names of images that only their own manifests know of."""

    def strangers(self, besides: Collection[Path] = ()) -> list[str]:
        """Files below the folder that featviz did not write, folders of nothing else as `src/`;
        those that are least deep come first.

        Args:
            besides: files that the user has named for this command to write.
        """
        ours, others = self._sorted(besides)
        tops = {PurePosixPath(way).parts[0] for way in ours}
        shown: dict[str, None] = {}
        for way in others:
            first, *deeper = PurePosixPath(way).parts
            shown[f"{first}/" if deeper and first not in tops else way] = None
        return sorted(shown, key=lambda way: way.rstrip("/").count("/"))

    def check(self, besides: Collection[Path] = ()) -> None:
        """Refuse to replace what is not ours.

        Raises:
            StoreError: names some of the files.
        """
        if others := self.strangers(besides):
            names = listed([quoted(name, 80) for name in others], _SHOWN)
            raise StoreError(
                f"--out {self.root} holds files that featviz did not write: {names}",
                "move them away, or name another folder with --out",
            )

    def files(self, besides: Collection[Path] = ()) -> list[str]:
        """What is ours, in the order in which it is to go: the record last.

        Raises:
            StoreError: something in the folder is not ours.
        """
        self.check(besides)
        ours, _ = self._sorted(besides)
        order = dict.fromkeys(self.first, 0) | {self.last: 3}
        return sorted(ours, key=lambda way: order.get(way, 2 if way.endswith(INDEX_FILE) else 1))

    def _sorted(self, besides: Collection[Path]) -> tuple[list[str], list[str]]:
        """All files below the folder: ours, and the others; without those besides, and the lock
        of whoever asks."""
        root = os.path.realpath(self.root)
        apart = {os.path.relpath(os.path.realpath(p), root).replace(os.sep, "/") for p in besides}
        apart.add(LOCK_FILE)
        ours: list[str] = []
        others: list[str] = []
        for way, regular in _walk(self.root):
            if way not in apart:
                (ours if regular and self.owns(_final(way)) else others).append(way)
        return ours, others


def holds_run(root: Path) -> bool:
    """Whether a folder holds a run, or kernels, by its run.json alone: no other file is looked at,
    of which there may be a hundred thousand."""
    return _run_record(root) is not None


def of_run(root: Path) -> Claim | None:
    """The run, or the kernels, that a folder holds; None where there is none of featviz."""
    record = _run_record(root)
    if record is None:
        return None
    report = _own_reports(root)
    bases = bool(record["options"].get("shared_basis"))
    known = {RUN_FILE, *([BASES_FILE] if bases else [])}
    known |= _audit_files(root) if (root / AUDIT_FILE).is_file() else set()
    images = _Images(root, record)

    def owns(way: str) -> bool:
        return way in known or report(way) or images.owns(way)

    manifests = tuple(str(PurePosixPath(way) / MANIFEST_FILE) for way in images.complete)
    return Claim(
        root, record, owns, len(images.complete), manifests, RUN_FILE, tuple(images.unlisted)
    )


def of_audit(root: Path) -> Claim | None:
    """The audit that a folder holds, of one model or of several."""
    listed, folders = _audit_files(root), [""]
    if (several := _record(root, MODELS_FILE)) is not None and "models" in several:
        rows = several["models"]
        labels = [row.get("model") for row in rows] if _are_dicts(rows) else []
        folders += [f"{safe_name(f'{n:02d}_{label}')}/" for n, label in enumerate(labels)]
        inside = {f"{name}{way}" for name in folders[1:] for way in _audit_files(root / name)}
        listed |= {MODELS_FILE, "models.png", *inside}
    reports = [(name, _own_reports(root / name)) for name in folders]

    def owns(way: str) -> bool:
        return way in listed or any(
            way.startswith(name) and report(way.removeprefix(name)) for name, report in reports
        )

    return Claim(root, {}, owns) if listed else None


def of_diff(root: Path) -> Claim | None:
    """The difference of two runs that a folder holds."""
    record = _record(root, DIFF_FILE)
    if record is None or not {"base", "new", "tolerance", "equal", "layers"} <= record.keys():
        return None
    maps = _listed(record.get("maps"), "file")
    listed = {
        DIFF_FILE,
        *REPORT_ASSETS,
        DIFF_GRIDS,
        *(way for way in maps if re.fullmatch(r"\d\d_[^/]+", way)),
    }
    return Claim(root, record, listed.__contains__)


def of_exemplars(root: Path) -> Claim | None:
    """The exemplars that a folder holds."""
    record = _record(root, EXEMPLARS_FILE)
    if record is None or not {"featviz", "model", "options", "shard", "layers"} <= record.keys():
        return None
    sheets = _listed(record["layers"], "sheet")
    rows = record["layers"] if _are_dicts(record["layers"]) else []
    channels = [way for row in rows for way in _listed(row.get("channels"), "file")]
    listed = {EXEMPLARS_FILE, *(way for way in (*sheets, *channels) if is_exemplar_file(way))}
    return Claim(root, record, listed.__contains__)


def of_report(root: Path) -> Claim | None:
    """The report that a folder holds: its pages say who wrote them."""
    return Claim(root, {}, _report_files(root)) if _is_page(root, INDEX_FILE) else None


def names_of_images(record: Mapping[str, Any]) -> list[str]:
    """The images that a run.json knows of: complete, missing or failed; none for kernels, and where
    it is damaged."""
    return _names(record) if _is_run(record) and record.get("kind") is None else []


def is_record_of_run(content: Any) -> bool:
    """Whether the content of a run.json is that of a run, or of kernels."""
    return _is_record(content) and _is_run(content)


def left_of_image(root: Path, way: str) -> list[str]:
    """Files of ours in the folder of an image that is not complete, the manifest first; relative
    to the run directory, as the folder."""
    files = [inside for inside, regular in _walk(root / way) if regular]
    ours = [inside for inside in files if is_own_name(_final(inside))]
    ours.sort(key=lambda inside: inside != MANIFEST_FILE)
    return [f"{way}/{inside}" if way else inside for inside in ours]


def is_archive_of_run(path: Path) -> bool:
    """Whether a file is a zip file with a run of featviz."""
    broken = (OSError, FileError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile)
    with suppress(*broken), files.open_regular(path) as file, zipfile.ZipFile(file) as packed:
        with packed.open(RUN_FILE) as record:
            content = files.parse_json(record.read(_LARGEST).decode("utf-8"))
        return is_record_of_run(content)
    return False


def is_archive_of_report(path: Path) -> bool:
    """Whether a file is a zip file with a report of featviz."""
    broken = (OSError, FileError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile)
    with suppress(*broken), files.open_regular(path) as file, zipfile.ZipFile(file) as packed:
        return GENERATOR in packed.open(INDEX_FILE).read(_HEAD)
    return False


def is_exemplar_file(way: str) -> bool:
    """Whether a file has a name that pictures of exemplars have."""
    return _EXEMPLAR_FILE.fullmatch(way) is not None and files.is_inside(way)


def is_suspects_file(way: str) -> bool:
    """Whether a file has a name that pictures of an audit's suspects have."""
    return _SUSPECTS_FILE.fullmatch(way) is not None and files.is_inside(way)


def is_page(path: Path) -> bool:
    """Whether a file is a page that featviz wrote."""
    return _is_page(path.parent, path.name)


class _Images:
    """The folders of a run's images."""

    def __init__(self, root: Path, record: Mapping[str, Any]) -> None:
        self.root = root
        alone = record.get("kind") is not None  # kernels stand in the root
        self.folders = {""} if alone else {safe_way(name) for name in _names(record)}
        self.complete = _manifests(root)
        self.unlisted = []
        for way in () if alone else [way for way in self.complete if way not in self.folders]:
            if (name := self._name_of(way)) is None:
                self.complete.remove(way)
            else:
                self.unlisted.append(name)
        self.folders |= set(self.complete)
        self._listed: dict[str, Collection[str] | None] = {}

    def owns(self, way: str) -> bool:
        """Whether a file lies in an image's folder, and its manifest lists it; without a manifest,
        or in a folder that was being written, whether it has a name that featviz gives."""
        for above in PurePosixPath(way).parents:
            folder = "" if str(above) == "." else str(above)
            inside = way[len(folder) + 1 :] if folder else way
            if folder in self.folders:
                listed = self._what_is_in(folder)
                return is_own_name(inside) if listed is None else inside in listed
            if self._is_hidden(above):
                return is_own_name(inside)
        return False

    def _is_hidden(self, folder: PurePosixPath) -> bool:
        """Whether it was being written in the place of an image's folder."""
        meant = atomic.folder_part_of(folder.name)
        return meant is not None and str(folder.with_name(meant)) in self.folders

    def _what_is_in(self, folder: str) -> Collection[str] | None:
        """What the manifest lists; None where it cannot tell."""
        if folder not in self._listed:
            content = _record(self.root, MANIFEST_FILE, folder)
            rows = None if content is None else content.get("captures")
            self._listed[folder] = _in_manifest(rows) if _are_dicts(rows) else None
        return self._listed[folder]

    def _name_of(self, way: str) -> str | None:
        """The image that a manifest speaks of, if it stands where this image's folder is."""
        content = _record(self.root, MANIFEST_FILE, way)
        image = content.get("image") if content is not None else None
        name = image.get("path") if isinstance(image, dict) else None
        return name if isinstance(name, str) and safe_way(name) == way else None


def _in_manifest(rows: Any) -> Collection[str]:
    """The files of an image, as its manifest lists them."""
    named = [way for kind in ("file", "tensor", "figure") for way in _listed(rows, kind)]
    pictures = (way for way in named if _LAYER_FILE.fullmatch(way))
    return {*_IMAGE_FILES, *pictures}


def _final(way: str) -> str:
    """The way of a file; of one that was being written, that of the file it was to become."""
    path = PurePosixPath(way)
    name = atomic.part_of(path.name)
    return way if name is None else str(path.with_name(name))


def is_own_name(inside: str) -> bool:
    """Whether a file in an image's folder has a name that featviz gives."""
    return inside in _IMAGE_FILES or _LAYER_FILE.fullmatch(inside) is not None


def _is_run(record: Mapping[str, Any]) -> bool:
    """Whether a run.json has what ours have had from the first."""
    texts = all(isinstance(record.get(name), str) for name in ("featviz", "torch"))
    tables = all(isinstance(record.get(name), dict) for name in ("model", "options"))
    if not texts or not tables or not isinstance(record.get("layers"), list):
        return False
    if record.get("kind") is not None:
        return bool(record["kind"] == "kernels")
    images = record.get("images")
    listed = isinstance(images, dict) and isinstance(images.get("complete"), list)
    return listed and _are_dicts(record.get("failures"))


def _run_record(root: Path) -> dict[str, Any] | None:
    """The content of a run.json that featviz wrote."""
    record = _record(root, RUN_FILE)
    return record if record is not None and _is_run(record) else None


def _names(record: Mapping[str, Any]) -> list[str]:
    """The images that a run.json knows of."""
    images = record["images"]
    missing = images.get("missing", [])
    names = [*images["complete"], *(missing if isinstance(missing, list) else [])]
    names += _listed(record["failures"], "image")
    return [name for name in names if isinstance(name, str) and name]


def _audit_files(root: Path) -> set[str]:
    """What the audit of one model lists; nothing where there is none."""
    record = _record(root, AUDIT_FILE)
    if record is None or not {"featviz", "model", "options", "layers", "total"} <= record.keys():
        return set()
    drawn = _listed(record.get("drawn"), "file")
    pictures = {way for way in drawn if is_suspects_file(way)}
    return {AUDIT_FILE, "channels.npz", "apoz.png", *pictures}


def _own_reports(root: Path) -> Owns:
    """The reports that stand in the folder of what they show."""
    known = {REPORT_FILE} if _is_page(root, REPORT_FILE) else set()
    known |= {REPORT_ZIP} if is_archive_of_report(root / REPORT_ZIP) else set()
    report = _report_files(root / REPORT)

    def owns(way: str) -> bool:
        inside = way.removeprefix(f"{REPORT}/")
        return way in known or (inside != way and report(inside))

    return owns


def _report_files(root: Path) -> Owns:
    """Files of a report, by name, and by how they begin."""

    def owns(way: str) -> bool:
        if way in REPORT_ASSETS or way in SERIES_ASSETS:
            return _is_page(root, INDEX_FILE)
        if _REPORT_FILE.fullmatch(way) is None:
            return False
        head = _head(root, way)
        return GENERATOR in head if way.endswith(".html") else head.startswith(_SCRIPT)

    return owns


def _is_page(root: Path, name: str) -> bool:
    return GENERATOR in _head(root, name)


def _head(root: Path, name: str) -> bytes:
    with suppress(OSError, FileError), Folder(root) as folder:
        return folder.head(name, _HEAD)[0]
    return b""


def _record(root: Path, name: str, way: str = "") -> dict[str, Any] | None:
    """One of our records in a folder, or in one below it; None where it is another program's, or
    cannot be read."""
    with suppress(OSError, FileError), Folder(root, way) as folder:
        content = folder.read_json(name, _LARGEST)
        if _is_record(content):
            return dict(content)
    return None


def _is_record(content: Any) -> bool:
    version = content.get("schema_version") if isinstance(content, dict) else None
    return isinstance(version, int) and not isinstance(version, bool) and version >= 1


def _are_dicts(rows: object) -> bool:
    return isinstance(rows, list) and all(isinstance(row, dict) for row in rows)


def _listed(rows: Any, name: str) -> list[str]:
    """One text of each row, where it has it."""
    if not isinstance(rows, list):
        return []
    texts = [row.get(name) for row in rows if isinstance(row, dict)]
    return [text for text in texts if isinstance(text, str)]


def _walk(root: Path) -> Iterator[tuple[str, bool]]:
    """All files below a folder, links and the like among them, and whether they are regular: the
    folder's own by name, then those of the folders in it. Paths are joined as text, which takes a
    fifth of the time of Path for the 60,000 files of 10,000 images."""
    waiting = [""]
    while waiting:
        here = waiting.pop()
        try:
            with os.scandir(root / here) as scanned:
                entries = sorted(scanned, key=lambda entry: entry.name)
        except OSError:  # it is gone, or closed to this user: nothing in it can be removed
            continue
        inner = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        waiting += [f"{here}{name}/" for name in reversed(inner)]
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                yield f"{here}{entry.name}", entry.is_file(follow_symlinks=False)


def _manifests(root: Path) -> list[str]:
    """Folders below a run directory that have a manifest, however deep; its own is ""."""
    ways = (way.rpartition("/") for way, regular in _walk(root) if regular)
    return [folder for folder, _, name in ways if name == MANIFEST_FILE]
