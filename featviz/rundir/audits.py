"""An audit that `featviz audit` wrote, read back. Nothing here needs torch."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from featviz import files
from featviz.errors import FileError, StoreError
from featviz.files import Folder
from featviz.rundir import AUDIT_FILE, RUN_FILE, schema
from featviz.rundir.image import ReadImage, pictures_beside, png_header
from featviz.rundir.schema import MOST_RECORD, Audit
from featviz.text import quoted


@dataclass(frozen=True)
class ReadAudit:
    """An audit, and the pictures of its suspects."""

    record: Audit
    pictures: ReadImage
    """As those of an image that has no input and no grids; what is missing is not among them:
    audit.json may have been copied alone."""


def is_audit(root: Path) -> bool:
    """Whether a folder holds an audit, and no run."""
    return (root / AUDIT_FILE).exists() and not (root / RUN_FILE).exists()


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
    found = {}
    with Folder(root) as folder:
        for row in record.drawn:
            with suppress(FileNotFoundError):
                found[row.file] = png_header(folder, row.file)
    return pictures_beside(root, "audit", found)
