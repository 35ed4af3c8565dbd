"""Which files of a folder featviz wrote: what `--overwrite` may remove, and what stops it.

A folder is ours if our record in it parses and says what our writers always say; a file is ours if
that record, or the manifest of one of its images, lists it. A hidden folder of an image is ours by
its name, with all that is in it: it was being written when its run was killed. In a folder that has
lost its manifest those files are ours that have the names that featviz gives. Nothing here needs
torch.

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
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from featviz import files
from featviz.errors import FileError, StoreError
from featviz.files import Folder
from featviz.records import FORMATS, KINDS
from featviz.rundir import (
    AUDIT_FILE,
    DIFF_FILE,
    DIFF_GRIDS,
    EXEMPLARS_FILE,
    INDEX_FILE,
    INPUT_FILE,
    LOCK_FILE,
    MANIFEST_FILE,
    REPORT,
    REPORT_ASSETS,
    REPORT_FILE,
    REPORT_ZIP,
    RUN_FILE,
    SERIES_ASSETS,
    SHARD_LOCKS,
    STATS_FILE,
    atomic,
)
from featviz.text import listed, quoted, safe_way

GENERATOR = b'<meta name="generator" content="featviz'
"""Stands at the beginning of every page of a report."""
HEAD = 1000
"""Bytes within which a file says who wrote it."""
BROKEN = (OSError, FileError, ValueError, KeyError, RuntimeError, SyntaxError, zipfile.BadZipFile)
"""What files of others raise when they are read as ours."""
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
_MAP_FILE = re.compile(r"\d\d_[^/]+")
_REPORT_FILE = re.compile(r"(image|layer)-\d+\.(html|js)|index\.(html|js)|grids-\d+-\d+\.js")
_SCRIPT = b"window.FEATVIZ"

Owns = Callable[[str], bool]
"""Whether a file, by its way relative to the folder, with forward slashes, was written by us."""


@dataclass(frozen=True)
class Claim:
    """A result of featviz in a folder, as its own record tells it."""

    root: Path
    mark: str
    """The record, which goes last: until then the rest is known to be ours."""
    record: Mapping[str, Any]
    owns: Owns
    complete: Collection[str] | None = None
    """Folders of the images of a run that are whole."""

    @property
    def is_complete(self) -> bool:
        """Whether something is lost by replacing it."""
        return self.complete is None or bool(self.complete)

    def files(self, besides: Collection[Path] = ()) -> list[str]:
        """What is ours, in the order in which it is to go: manifests first, without which nothing
        looks complete, and the record last.

        Args:
            besides: files that the user has named for this command to write.

        Raises:
            StoreError: something in the folder is not ours; names files, folders of nothing else as
                `src/`, those that are least deep first.
        """
        root = os.path.realpath(self.root)
        apart = {os.path.relpath(os.path.realpath(p), root).replace(os.sep, "/") for p in besides}
        ours: list[str] = []
        others: list[str] = []
        for way, regular in walk(self.root):
            if way not in apart and not is_lock(way):
                (ours if regular and self.owns(_final(way)) else others).append(way)
        if others:
            tops = {way.partition("/")[0] for way in ours}
            firsts = [(way.partition("/")[0], way) for way in others]
            shown = [f"{top}/" if top not in (way, *tops) else way for top, way in firsts]
            least = sorted(dict.fromkeys(shown), key=lambda way: way.rstrip("/").count("/"))
            names = listed([quoted(name, 80) for name in least], _SHOWN)
            raise StoreError(
                f"--out {self.root} holds files that featviz did not write: {names}",
                "move them away, or name another folder with --out",
            )
        order = {str(PurePosixPath(way) / MANIFEST_FILE): 0 for way in self.complete or ()}
        order[self.mark] = 3
        return sorted(ours, key=lambda way: order.get(way, 2 if way.endswith(INDEX_FILE) else 1))


def holds_run(root: Path) -> bool:
    """Whether a folder holds a run, or kernels, by its run.json alone: no other file is looked at,
    of which there may be a hundred thousand."""
    return _run_record(root) is not None


def of_run(root: Path) -> Claim | None:
    """The run, or the kernels, that a folder holds; None where there is none of featviz."""
    record = _run_record(root)
    if record is None:
        return None
    alone = record.get("kind") is not None  # kernels stand in the root
    folders = {""} if alone else {safe_way(name) for name in _names(record)}
    ends = (way.rpartition("/") for way, regular in walk(root) if regular)
    manifests = [folder for folder, _, name in ends if name == MANIFEST_FILE]
    complete = [f for f in manifests if alone or f in folders or _is_image(root, f)]
    folders.update(complete)
    manifest_of, is_beside = cache(lambda folder: _in_manifest(root, folder)), beside(root)

    def owns(way: str) -> bool:
        """In an image's folder its manifest says it; without one, the name of the file. In a folder
        that was being written all is ours."""
        if way == RUN_FILE or is_beside(way):
            return True
        for above in PurePosixPath(way).parents:
            folder = "" if str(above) == "." else str(above)
            if folder in folders:
                inside, named = way[len(folder) + 1 :] if folder else way, manifest_of(folder)
                return is_own_name(inside) if named is None else inside in named
            meant = atomic.part_of(above.name)
            if meant is not None and str(above.with_name(meant)) in folders:
                return True
        return False

    return Claim(root, RUN_FILE, record, owns, complete)


def of_audit(root: Path) -> Claim | None:
    """The audit that a folder holds."""
    return Claim(root, AUDIT_FILE, {}, beside(root)) if _audit_files(root) else None


def of_diff(root: Path) -> Claim | None:
    """The difference of two runs that a folder holds."""
    record = _record(root, DIFF_FILE)
    if record is None or not {"base", "new", "tolerance", "equal", "layers"} <= record.keys():
        return None
    maps = filter(_MAP_FILE.fullmatch, _listed(record.get("maps"), "file"))
    known = {DIFF_FILE, *REPORT_ASSETS, DIFF_GRIDS, *maps}
    return Claim(root, DIFF_FILE, record, known.__contains__)


def of_exemplars(root: Path) -> Claim | None:
    """The exemplars that a folder holds."""
    record = _record(root, EXEMPLARS_FILE)
    keys = {"featviz", "model", "options", "never_ran", "layers"}
    if record is None or not keys <= record.keys():
        return None
    named = _listed(record["layers"], "sheet")
    for row in record["layers"] if _are_dicts(record["layers"]) else ():
        named += _listed(row.get("channels"), "file")
    known = {EXEMPLARS_FILE, *filter(is_exemplar_file, named)}
    return Claim(root, EXEMPLARS_FILE, record, known.__contains__)


def of_report(root: Path) -> Claim | None:
    """The report that a folder holds: its pages say who wrote them."""
    ours = GENERATOR in _head(root, INDEX_FILE)
    return Claim(root, INDEX_FILE, {}, _report_files(root)) if ours else None


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
    files = [inside for inside, regular in walk(root / way) if regular]
    ours = [inside for inside in files if is_own_name(_final(inside))]
    ours.sort(key=lambda inside: inside != MANIFEST_FILE)
    return [f"{way}/{inside}" if way else inside for inside in ours]


def is_archive_of_report(file: BinaryIO) -> bool:
    """Whether an open file is a zip file with a report of featviz; may raise BROKEN."""
    with zipfile.ZipFile(file) as packed, packed.open(INDEX_FILE) as page:
        return GENERATOR in page.read(HEAD)


def is_exemplar_file(way: str) -> bool:
    """Whether a file has a name that pictures of exemplars have."""
    return _EXEMPLAR_FILE.fullmatch(way) is not None and files.is_inside(way)


def is_suspects_file(way: str) -> bool:
    """Whether a file has a name that pictures of an audit's suspects have."""
    return _SUSPECTS_FILE.fullmatch(way) is not None and files.is_inside(way)


def is_lock(way: str) -> bool:
    """Whether a file of a folder is the lock of who writes it, or of a shard."""
    return way == LOCK_FILE or SHARD_LOCKS.fullmatch(way) is not None


def is_own_name(inside: str) -> bool:
    """Whether a file in an image's folder has a name that featviz gives."""
    return inside in _IMAGE_FILES or _LAYER_FILE.fullmatch(inside) is not None


def _in_manifest(root: Path, folder: str) -> Collection[str] | None:
    """What the manifest of an image lists; None where it cannot tell."""
    rows = (_record(root, MANIFEST_FILE, folder) or {}).get("captures")
    if not _are_dicts(rows):
        return None
    named = [way for kind in ("file", "tensor", "figure") for way in _listed(rows, kind)]
    return {*_IMAGE_FILES, *filter(_LAYER_FILE.fullmatch, named)}


def _is_image(root: Path, way: str) -> bool:
    """Whether a manifest that run.json does not know of stands where its image's folder is."""
    image = (_record(root, MANIFEST_FILE, way) or {}).get("image")
    name = image.get("path") if isinstance(image, dict) else None
    return isinstance(name, str) and safe_way(name) == way


def _final(way: str) -> str:
    """The way of a file; of one that was being written, that of the file it was to become."""
    path = PurePosixPath(way)
    name = atomic.part_of(path.name)
    return way if name is None else str(path.with_name(name))


def _is_run(record: Mapping[str, Any]) -> bool:
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
    """The files of the audit in a folder; none where there is no audit."""
    record = _record(root, AUDIT_FILE)
    if record is None or not {"featviz", "model", "options", "layers", "total"} <= record.keys():
        return set()
    drawn = filter(is_suspects_file, _listed(record.get("drawn"), "file"))
    return {AUDIT_FILE, "channels.npz", "apoz.png", *drawn}


def beside(root: Path) -> Owns:
    """What stands beside a run: the files of its audit, and the reports that show either."""
    known = _audit_files(root)
    known |= {REPORT_FILE} if GENERATOR in _head(root, REPORT_FILE) else set()
    with suppress(*BROKEN), files.open_regular(root / REPORT_ZIP) as file:
        known |= {REPORT_ZIP} if is_archive_of_report(file) else set()
    report = _report_files(root / REPORT)

    def owns(way: str) -> bool:
        inside = way.removeprefix(f"{REPORT}/")
        return way in known or (inside != way and report(inside))

    return owns


def _report_files(root: Path) -> Owns:
    """Files of a report, by name, and by how they begin."""

    def owns(way: str) -> bool:
        if way in REPORT_ASSETS or way in SERIES_ASSETS:
            return GENERATOR in _head(root, INDEX_FILE)
        if _REPORT_FILE.fullmatch(way) is None:
            return False
        head = _head(root, way)
        return GENERATOR in head if way.endswith(".html") else head.startswith(_SCRIPT)

    return owns


def _head(root: Path, name: str) -> bytes:
    with suppress(OSError, FileError), Folder(root) as folder:
        return folder.head(name, HEAD)[0]
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
    """What the rows of a record say under a name, as far as they are rows and it is text."""
    found = (
        [row.get(name) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    )
    return [text for text in found if isinstance(text, str)]


def walk(root: Path) -> Iterator[tuple[str, bool]]:
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
