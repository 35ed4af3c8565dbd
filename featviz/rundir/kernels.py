"""A folder that `featviz kernels` wrote, read back. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featviz.errors import FileError, StoreError
from featviz.files import Folder
from featviz.rundir import MANIFEST_FILE, RUN_FILE, schema
from featviz.rundir.image import ReadImage, check_picture, pictures_beside
from featviz.rundir.read import read_json
from featviz.rundir.schema import MOST_RECORD
from featviz.text import quoted


@dataclass(frozen=True)
class ReadKernels:
    """The kernels of a model's layers."""

    record: Mapping[str, Any]
    """What run.json says: the model, versions, and options."""
    pictures: ReadImage

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
    record = read_json(root / RUN_FILE) if (root / RUN_FILE).exists() else {}
    if record.get("kind") != "kernels":
        raise StoreError(
            f"{quoted(str(root))} holds no kernels", "give a folder that `featviz kernels` wrote"
        )
    try:
        with Folder(root) as folder:
            rows = schema.check_kernels(folder.read_json(MANIFEST_FILE, MOST_RECORD))
            sizes = [(row.plan.width, row.plan.height) for row in rows]
            found = {
                row.file: (size, check_picture(folder, row.file, size))
                for row, size in zip(rows, sizes, strict=True)
            }
    except FileNotFoundError as error:
        missing = quoted(str(root / str(error.filename)))
        raise StoreError(f"{missing} is missing", "draw the kernels again") from None
    except (FileError, ValueError) as error:
        raise StoreError(f"{quoted(str(root / MANIFEST_FILE))}: {error}") from error
    return ReadKernels(record, pictures_beside(root, "kernels", found, rows))
