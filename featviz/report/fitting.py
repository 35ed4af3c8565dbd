"""A report in one file that mail servers take: of a large run each layer shows fewer maps."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from PIL import Image

from featviz.records import CaptureKey
from featviz.report.network import is_numbers, most_varied
from featviz.rundir.image import ReadImage, format_of
from featviz.rundir.read import ReadRun
from featviz.rundir.schema import Capture

MOST_BYTES = 25_000_000
"""About so many bytes has one file at most: what usual mail servers take."""
FEWEST = 4
"""Maps of a layer below which it shows too little, however large the file becomes."""
_BASE64 = 4 / 3


@dataclass(frozen=True)
class FewerMaps(ReadImage):
    """An image whose grids show some of their maps; `whole` has the rows of its files."""

    whole: Mapping[str, Capture] = field(default_factory=dict)

    def content(self, relative: str) -> bytes:
        """A picture's bytes; of a grid that shows fewer maps, those of a new picture."""
        part = next((row for row in self.manifest.captures if row.file == relative), None)
        whole = self.whole.get(relative)
        if part is None or whole is None or part is whole:
            return super().content(relative)
        drawn, canvas = self.picture(relative), (part.plan.width, part.plan.height)
        picture = Image.new(drawn.mode, canvas)
        if drawn.mode == "P":
            picture.putpalette(drawn.getpalette() or [])
        if part.plan.padding:
            picture.paste(drawn.getpixel((0, 0)), (0, 0, *canvas))  # type: ignore[arg-type]
        for place, channel in enumerate(part.drawn):
            for slice in range(whole.side):
                slot = whole.drawn.index(channel) * whole.side + slice
                left, top, width, height = whole.plan.box(slot)
                tile = drawn.crop((left, top, left + width, top + height))
                picture.paste(tile, part.plan.box(place * whole.side + slice)[:2])
        target, kind = io.BytesIO(), format_of(relative)
        picture.save(target, kind.pillow, **(kind.save or {"optimize": True}))
        return target.getvalue()


def fitted(runs: Sequence[ReadRun]) -> tuple[Sequence[ReadRun], int | None]:
    """These runs, and the most maps that a layer shows so that one file has about MOST_BYTES: those
    of the most varied channels of the first image. None, and all maps, where all pictures fit."""
    images = [image for run in runs for image in run.images.values()]
    if _BASE64 * sum(sum(image.sizes.values()) for image in images) <= MOST_BYTES:
        return runs, None
    grids = [(len(row.drawn), i.sizes[row.file]) for i in images for row in i.captures.values()]
    count = max((maps for maps, _ in grids), default=FEWEST)
    while (
        count > FEWEST
        and _BASE64 * sum(size * min(1, count / max(1, maps)) for maps, size in grids) > MOST_BYTES
    ):
        count = max(FEWEST, count // 2)
    chosen: dict[CaptureKey, set[int | None]] = {}
    for image in runs[0].images.values():
        numbers = image.stats()
        for place, row in image.captures.items():
            if row.drawn and place not in chosen:
                chosen[place] = {*most_varied(row, numbers[place.stats_key], count)}
    shown = []
    for run in runs:
        fewer = {name: _with_fewer(image, chosen) for name, image in run.images.items()}
        shown.append(replace(run, images=fewer))
    return shown, count


def _with_fewer(image: ReadImage, chosen: Mapping[CaptureKey, set[int | None]]) -> ReadImage:
    rows = []
    for row in image.manifest.captures:
        own = chosen.get(row.place, set())
        stay = [c for c in row.drawn if c in own] or row.drawn[: len(own)]
        if stay and len(stay) < len(row.drawn) and not is_numbers(row):
            columns = min(row.plan.columns, math.ceil(math.sqrt(len(stay))) * row.side)
            grid = row.grid.copy()
            grid["nrow"] = columns
            kept = {c: ids for c, ids in (row.collapsed or {}).items() if int(c) in stay}
            rows.append(replace(row, channels=stay, grid=grid, collapsed=kept or None))
        else:
            rows.append(row)
    whole = {row.file: row for row in image.manifest.captures}
    changed = {**vars(image), "manifest": replace(image.manifest, captures=rows), "whole": whole}
    changed.pop("captures", None)
    return FewerMaps(**changed)
