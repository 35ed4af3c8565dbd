"""A report in one file that mail servers take: of a large run each layer shows fewer
maps."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from PIL import Image

from featviz.records import CaptureKey
from featviz.report.stages import is_numbers, most_varied
from featviz.rundir.image import ReadImage, format_of
from featviz.rundir.read import ReadRun
from featviz.rundir.schema import Capture

MOST_BYTES = 25_000_000
"""About how many bytes one file has at most: what usual mail servers take."""
FEWEST = 4
"""Maps of a layer below which it shows too little, however large the file becomes."""
# characters for each byte of a picture, which stands in the page as text
_BASE64 = 4 / 3


@dataclass(frozen=True)
class FewerMaps(ReadImage):
    """An image whose grids show some of their maps."""

    file_rows: Mapping[str, Capture] = field(default_factory=dict)
    """The rows of the grids that show fewer maps, as they are in the files."""

    def content(self, relative: str) -> bytes:
        """A picture's bytes; of a grid that shows fewer maps, those of a new picture.

        Args:
            relative: its path in the image's folder.
        """
        file_row = self.file_rows.get(relative)
        if file_row is None:
            return super().content(relative)
        row = self.captures[file_row.capture_key]
        return _encoded(_rearranged(self.picture(relative), file_row, row), relative)


def _rearranged(grid: Image.Image, file_row: Capture, row: Capture) -> Image.Image:
    """A grid with the maps of another row.

    Args:
        grid: the picture of `file_row`, of any mode.
        row: the same tensor with fewer channels drawn, in as many slices.
    """
    size = (row.plan.width, row.plan.height)
    picture = Image.new(grid.mode, size)
    if grid.mode == "P":
        picture.putpalette(grid.getpalette() or [])
    # the corner pixel has the colour of the gaps
    if row.plan.padding:
        picture.paste(grid.getpixel((0, 0)), (0, 0, *size))  # type: ignore[arg-type]
    slices = file_row.slice_count
    for position, channel in enumerate(row.drawn):
        file_position = file_row.drawn.index(channel)
        for slice in range(slices):
            left, top, width, height = file_row.plan.box(file_position * slices + slice)
            tile = grid.crop((left, top, left + width, top + height))
            new_left, new_top, _, _ = row.plan.box(position * slices + slice)
            picture.paste(tile, (new_left, new_top))
    return picture


def _encoded(picture: Image.Image, name: str) -> bytes:
    """A file in the format of a file name, with the options by which `run` writes it."""
    format = format_of(name)
    buffer = io.BytesIO()
    picture.save(buffer, format.pillow, **(format.save or {"optimize": True}))
    return buffer.getvalue()


def fitted(runs: Sequence[ReadRun]) -> tuple[Sequence[ReadRun], int | None]:
    """Leave out maps so that one file has about MOST_BYTES: each layer shows those of
    its most varied channels in the first image.

    Args:
        runs: that of the report, and the one to compare with if there is one.

    Returns:
        The runs, and the most maps that a layer shows; None, and all maps, where all
        pictures fit.
    """
    images: list[ReadImage] = []
    for run in runs:
        images.extend(run.images.values())
    total = sum(sum(image.sizes.values()) for image in images)
    if _BASE64 * total <= MOST_BYTES:
        return runs, None
    count = _fitting_count(images)
    # One choice for all images and both runs, so that the same tile is the same channel
    # wherever a page sets grids side by side.
    channels: dict[CaptureKey, set[int | None]] = {}
    for image in runs[0].images.values():
        stats = image.stats()
        for key, row in image.captures.items():
            if row.drawn and key not in channels:
                channels[key] = set(most_varied(row, stats[key.stats_key], count))
    fitted_runs = []
    for run in runs:
        fewer = {}
        for name, image in run.images.items():
            fewer[name] = _with_fewer(image, channels)
        fitted_runs.append(replace(run, images=fewer))
    return fitted_runs, count


def _fitting_count(images: Sequence[ReadImage]) -> int:
    """How many maps of each layer fit, about: halved until they do."""
    grids = []
    for image in images:
        for row in image.captures.values():
            grids.append((len(row.drawn), image.sizes[row.file]))
    # About, since a grid is taken to shrink with its maps; its picture is not yet drawn.
    count = max((maps for maps, _ in grids), default=FEWEST)
    while count > FEWEST:
        total = sum(size * min(1, count / max(1, maps)) for maps, size in grids)
        if _BASE64 * total <= MOST_BYTES:
            break
        count = max(FEWEST, count // 2)
    return count


def _with_fewer(
    image: ReadImage, channels: Mapping[CaptureKey, set[int | None]]
) -> ReadImage:
    """An image whose grids show some channels."""
    rows = []
    file_rows = {}
    for row in image.manifest.captures:
        shown = _fewer(row, channels.get(row.capture_key, set()))
        rows.append(shown)
        # the row itself where nothing is left out
        if shown is not row:
            file_rows[row.file] = row
    return FewerMaps(
        root=image.root,
        folder=image.folder,
        manifest=replace(image.manifest, captures=rows),
        input_size=image.input_size,
        sizes=image.sizes,
        kept_stats=image.kept_stats,
        pixels=image.pixels,
        file_rows=file_rows,
    )


def _fewer(row: Capture, channels: set[int | None]) -> Capture:
    """A row that draws some channels; where none of them is drawn, as many of the first
    ones. The row itself where there is nothing to leave out.

    Args:
        channels: in any order; they keep the order in which the row draws them.
    """
    remaining = [channel for channel in row.drawn if channel in channels]
    remaining = remaining or row.drawn[: len(channels)]
    if not remaining or len(remaining) == len(row.drawn) or is_numbers(row):
        return row
    # as square as possible, with the slices of a channel in one row
    columns = min(
        row.plan.columns, math.ceil(math.sqrt(len(remaining))) * row.slice_count
    )
    # keys of JSON are text
    collapsed = {}
    for leader, channels_alike in (row.collapsed or {}).items():
        if int(leader) in remaining:
            collapsed[leader] = channels_alike
    return replace(
        row,
        channels=remaining,
        grid={**row.grid, "nrow": columns},
        collapsed=collapsed or None,
    )
