"""A folder that `featviz kernels` wrote, read back. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featviz.errors import FileError, StoreError
from featviz.files import Folder
from featviz.rundir import MANIFEST_FILE, RUN_FILE, schema
from featviz.rundir.image import ReadImage, check_picture
from featviz.rundir.read import read_json
from featviz.rundir.schema import MOST_RECORD, ImageFields, Input, Manifest
from featviz.text import quoted


@dataclass(frozen=True)
class ReadKernels:
    """The kernels of a model's layers."""

    record: Mapping[str, Any]
    """What run.json says: the model, versions, and options."""
    pictures: ReadImage
    """As those of an image that has no input."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Those by which they were drawn."""
        return self._mapping("options")

    @property
    def model(self) -> Mapping[str, Any]:
        """What is known of the model."""
        return self._mapping("model")

    def _mapping(self, name: str) -> Mapping[str, Any]:
        """A part of the record, which may be anybody's."""
        found = self.record.get(name)
        return found if isinstance(found, dict) else {}


def is_kernels(root: Path) -> bool:
    """Whether a folder holds kernels: their manifest stands beside run.json, which says so."""
    try:
        there = (root / MANIFEST_FILE).exists()
        return there and read_json(root / RUN_FILE).get("kind") == "kernels"
    except StoreError:
        return False


def read_kernels(root: Path) -> ReadKernels:
    """Read what `featviz kernels` wrote.

    Raises:
        StoreError: it holds no kernels, or a file of it is missing or does not fit.
    """
    record = read_json(root / RUN_FILE)
    if record.get("kind") != "kernels":
        raise StoreError(f"{quoted(str(root))} holds no kernels", "give what featviz kernels wrote")
    try:
        with Folder(root) as folder:
            rows = schema.check_kernels(folder.read_json(MANIFEST_FILE, MOST_RECORD))
            sizes = {
                row.file: check_picture(folder, row.file, (row.plan.width, row.plan.height))
                for row in rows
            }
    except FileNotFoundError as error:
        missing = quoted(str(root / str(error.filename)))
        raise StoreError(f"{missing} is missing", "draw the kernels again") from None
    except (FileError, ValueError) as error:
        raise StoreError(f"{quoted(str(root / MANIFEST_FILE))}: {error}") from error
    named = ImageFields(path="kernels", sha256="")
    manifest = Manifest(1, named, Input([], ""), rows, [], [])
    return ReadKernels(record, ReadImage(root, "", manifest, (0, 0), sizes))
