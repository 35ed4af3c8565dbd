"""An audit that `featviz audit` wrote, read back. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from featviz import files
from featviz.errors import FileError, StoreError
from featviz.files import Folder
from featviz.rundir import AUDIT_FILE, MODELS_FILE, RUN_FILE, schema
from featviz.rundir.image import ReadImage, png_header
from featviz.rundir.ownership import is_suspects_file
from featviz.rundir.schema import MOST_RECORD, Audit, ImageFields, Input, Manifest
from featviz.text import listed, quoted

_SHOWN = 3
"""Folders that a message names."""


@dataclass(frozen=True)
class ReadAudit:
    """An audit, and the pictures of its suspects."""

    record: Audit
    pictures: ReadImage
    """As those of an image that has no input and no grids; what is missing is not among them:
    audit.json may have been copied alone."""


def is_audit(root: Path) -> bool:
    """Whether a folder holds an audit, and no run.

    Raises:
        StoreError: it holds audits of several models, of which each has a folder.
    """
    if (root / RUN_FILE).exists():
        return False
    if (root / MODELS_FILE).exists() and not (root / AUDIT_FILE).exists():
        inner = [str(path.parent) for path in sorted(root.glob(f"*/{AUDIT_FILE}"))]
        raise StoreError(
            f"{quoted(str(root))} holds the audits of several models",
            f"give the folder of one: {listed([quoted(way) for way in inner], _SHOWN)}",
        )
    return (root / AUDIT_FILE).exists()


def read_audit(root: Path, given: Path | None) -> ReadAudit | None:
    """The audit that was asked for, a file or its folder, or the one in `root`; None where there
    is none.

    Raises:
        StoreError: it is no audit.json, or a picture of suspects is none.
    """
    path = root / AUDIT_FILE if given is None else given
    if given is not None and path.is_dir():
        path /= AUDIT_FILE
    try:
        if given is None:
            with Folder(root) as folder:
                content = folder.read_json(AUDIT_FILE, MOST_RECORD)
        else:
            content = files.read_json(path, MOST_RECORD)
        record = schema.check_audit(content)
        for contradiction in _contradictions(record):
            raise ValueError(contradiction)
        return ReadAudit(record, _read_pictures(path.parent, record))
    except FileNotFoundError as error:
        if given is None:
            return None
        reason = str(error.strerror)
    except (FileError, ValueError) as error:
        reason = str(error)
    raise StoreError(
        f"{quoted(str(path))} is no audit.json: {reason}", "give one that featviz audit wrote"
    )


def _read_pictures(root: Path, record: Audit) -> ReadImage:
    """The pictures of suspects that are there."""
    sizes: dict[str, int] = {}
    pixels: dict[str, tuple[int, int]] = {}
    with Folder(root) as folder:
        for row in record.drawn:
            with suppress(FileNotFoundError):
                pixels[row.file], sizes[row.file] = png_header(folder, row.file)
    manifest = Manifest(1, ImageFields(path="audit", sha256=""), Input([], ""), [], [], [])
    return ReadImage(root, "", manifest, (0, 0), sizes, pixels=pixels)


def _contradictions(record: Audit) -> Iterator[str]:
    for n, row in enumerate(record.drawn):
        if not is_suspects_file(row.file):
            yield schema.misfit(f"drawn[{n}].file", row.file, "suspects/NAME.png")
