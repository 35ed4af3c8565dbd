"""What the images of a run have in common, held once: of 10,000 images nearly all layers, shapes
and grids are the same. Nothing here needs torch."""

from __future__ import annotations

import marshal
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, TypeVar

from featviz.rundir.image import ReadImage
from featviz.rundir.schema import CaptureRow, Input, Manifest

_T = TypeVar("_T")

_OF_ROW = (
    *("layer", "type", "kind", "key", "layout", "file", "normalize"),
    *("shape", "grid", "slices", "steps", "plan"),
)
"""Fields of a row of `captures` that other images have with the same value. Python holds the names
of a class's attributes once for all its objects only up to 30 of them; a row is close to that."""
_OF_MANIFEST = ("never_ran", "fingerprint")
_OF_INPUT = ("shape", "preprocessing")
_SMALL = 64
"""Entries of a list that is worth a look."""


class Shared:
    """Images of one run, whose equal values become one object each. An image of two layers and
    five likely classes takes 4 KB instead of 11."""

    def __init__(self) -> None:
        self._held: dict[Hashable, Any] = {}

    def image(self, image: ReadImage) -> ReadImage:
        """The same image. Its manifest has no `files` any more: they have been compared with the
        files that are there, and checksums are looked at by `verify`, which reads them itself.

        Args:
            image: just read; nobody else holds it, and its rows are changed in place.
        """
        for row in image.manifest.captures:
            self._share(row, _OF_ROW)
        skipped = [self._one(skip) for skip in image.manifest.skipped]
        manifest = replace(image.manifest, files=None, skipped=skipped)
        self._share(manifest, _OF_MANIFEST)
        self._share(manifest.input, _OF_INPUT)
        sizes = {self._one(name): size for name, size in image.sizes.items()}
        input_size = self._one(image.input_size)
        return replace(image, manifest=manifest, sizes=sizes, input_size=input_size)

    def _share(self, record: CaptureRow | Manifest | Input, names: tuple[str, ...]) -> None:
        """Put shared objects into a record that is frozen for all others."""
        vars(record).update({name: self._one(getattr(record, name)) for name in names})

    def _one(self, value: _T) -> _T:
        """The object that was first met with this value."""
        held: _T = self._held.setdefault(_key(value), value)
        return held


def _key(value: Any) -> Hashable:
    """Equal for equal values of one type."""
    if isinstance(value, (list, dict)):
        return marshal.dumps(value, 2) if len(value) <= _SMALL else id(value)
    return type(value), value
