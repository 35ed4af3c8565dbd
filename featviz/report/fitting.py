"""Makes a report in one file small enough for mail servers: in a large run, each layer
shows only some of its maps."""

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
"""About how many bytes the file may have: usual mail servers accept this size."""
FEWEST = 4
"""How many maps each layer shows at least, even if the file becomes too large."""
_BASE64 = 4 / 3
"""How many characters of the page a byte of a picture takes."""


@dataclass(frozen=True)
class FewerMaps(ReadImage):
    """An image of which some grids are shown with fewer maps than their files have. The
    rows of its manifest are those of the smaller grids; `content` makes their pictures."""

    file_rows: Mapping[str, Capture] = field(default_factory=dict)
    """The original rows of the smaller grids, by file."""

    def content(self, relative: str) -> bytes:
        """The bytes of a picture. The picture of a smaller grid is made from the file at
        each call.

        Args:
            relative: the path of the picture in the image's folder.
        """
        file_row = self.file_rows.get(relative)
        if file_row is None:
            return super().content(relative)
        row = self.captures[file_row.capture_key]
        return _encoded(_rearranged(self.picture(relative), file_row, row), relative)


def _rearranged(grid: Image.Image, file_row: Capture, row: Capture) -> Image.Image:
    """Make a smaller grid from the tiles of a larger one.

    Args:
        grid: the picture of the larger grid, of any mode.
        file_row: the row of the larger grid.
        row: the row of the smaller grid: the same tensor, with fewer channels drawn and
            the same slices.
    """
    picture = Image.new(grid.mode, row.size)
    if grid.mode == "P":
        picture.putpalette(grid.getpalette() or [])
    # the gaps have the colour of the corner pixel
    if row.plan.padding:
        picture.paste(grid.getpixel((0, 0)), (0, 0, *row.size))  # type: ignore[arg-type]
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
    """The bytes of a picture, in the format that the ending of `name` says."""
    format = format_of(name)
    buffer = io.BytesIO()
    picture.save(buffer, format.pillow, **(format.save or {"optimize": True}))
    return buffer.getvalue()


def fit_into_one_file(runs: Sequence[ReadRun]) -> tuple[Sequence[ReadRun], int | None]:
    """Leave out maps, so that a report in one file has at most about MOST_BYTES. Each layer
    then shows the channels that vary most in the first image that has the layer.

    Args:
        runs: the run of the report and, if there is one, the run to compare with.

    Returns:
        The runs with fewer maps, and the most maps that a layer shows. If all maps fit,
        the same runs and None.
    """
    images: list[ReadImage] = []
    for run in runs:
        images.extend(run.images.values())
    total = sum(sum(image.sizes.values()) for image in images)
    if _BASE64 * total <= MOST_BYTES:
        return runs, None
    count = _fitting_count(images)
    # The channels are the same in all images and both runs: a page shows their grids side
    # by side, and equal places must show the same channel.
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
    """About how many maps of each layer fit, at least FEWEST: the largest number of maps of
    a grid, halved until the sum of the pictures fits."""
    grids = []
    for image in images:
        for row in image.captures.values():
            grids.append((len(row.drawn), image.sizes[row.file]))
    # an estimate: the bytes of a picture are taken to be in proportion to its maps
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
    """The image with smaller grids.

    Args:
        channels: the channels to show, by capture key; may lack captures of this image.
    """
    rows = []
    file_rows = {}
    for row in image.manifest.captures:
        shown = _fewer(row, channels.get(row.capture_key, set()))
        rows.append(shown)
        # `_fewer` returns the same row if it leaves out nothing
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
    """A row with only some of its drawn channels, in their order; the same row if nothing
    is left out.

    Args:
        channels: the channels that remain. If the row draws none of these, as many of its
            first channels remain instead.
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
