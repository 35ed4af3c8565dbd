"""One tensor's way to a picture: layout, stats, scale, grid; then encode and write."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import BinaryIO

import numpy as np
from PIL import Image
from torch import Tensor

from featviz.drawing import dress, grid, normalize, png, stats, tiles
from featviz.drawing.normalize import Scale
from featviz.drawing.reduce import Basis
from featviz.drawing.tiles import Drawing
from featviz.layout import to_maps
from featviz.records import KINDS, Bytes, Capture, CaptureKind, DrawOptions, Hints, Site

log = logging.getLogger(__name__)


class Drawer:
    """How tensors are drawn: the options, with the scales read, for gradients and all else."""

    def __init__(self, options: DrawOptions, bases: Mapping[str, Basis] | None = None) -> None:
        """Read the options.

        Args:
            bases: of principal components, by `Site.stats_key`.

        Raises:
            UsageError: no such scale.
        """
        self.options = options
        self.bases = bases or {}
        self._said = False
        self._ways = {kind.name: _as_drawn(kind, options) for kind in KINDS.values()}

    def of(self, kind: str) -> tuple[DrawOptions, Scale]:
        """The options and the scale for tensors of a kind: a name of `records.KINDS`."""
        return self._ways[kind]

    def draw(
        self, site: Site, tensor: Tensor, hints: Hints | None, ground: Sequence[Bytes] = ()
    ) -> dict[str, Drawing]:
        """Draw what was met at a site; see `draw` and `dressing.lay_over`."""
        options, mode = self.of(site.kind)
        parts = draw(tensor, options, mode, hints, self.bases.get(site.stats_key))
        found = {key: dress.lay_over(part, ground, options) for key, part in parts.items()}
        for drawing in found.values():
            self._check_labels(site, drawing)
        return found

    def _check_labels(self, site: Site, drawing: Drawing) -> None:
        """Say once where labels are left out."""
        if not self._said and not dress.labels_fit(drawing):
            self._said = True
            height, width = drawing.plan.tile
            log.warning(
                "labels do not all fit the tiles of %d×%d pixels of %s, and are left out there; "
                "--scale or --min-tile makes tiles larger",
                width,
                height,
                site.layer.label,
            )


def _as_drawn(kind: CaptureKind, options: DrawOptions) -> tuple[DrawOptions, Scale]:
    """The options with the kind's own normalisation and colormap where `auto` stands."""
    autos = {k: getattr(kind, k) for k in ("normalize", "cmap") if getattr(options, k) == "auto"}
    drawn = replace(options, **autos)
    return drawn, normalize.parse_scale(drawn.normalize)


def draw(
    tensor: Tensor,
    options: DrawOptions,
    mode: Scale,
    hints: Hints | None = None,
    basis: Basis | None = None,
) -> dict[str, Drawing]:
    """Turn a tensor into tiles and statistics, on its device.

    Args:
        basis: of the principal components of the tensor's maps, for `reduce="pca"`.

    Returns:
        The tensor's maps under the empty key; tokens beside the grid under their names.

    Raises:
        LayoutError: no layout fits, or a picture is larger than its format can hold.
    """
    return {
        key: tiles.draw_maps(maps, dress.coloured(options, maps), mode, basis)
        for key, maps in to_maps(tensor, hints or Hints()).items()
    }


def describe(
    drawing: Drawing, site: Site, shape: Sequence[int], file: str, values: int | None = None
) -> Capture:
    """The manifest's row for a drawing; `values` of a channel, where they are not a map's."""
    plan, limits = drawing.plan, drawing.limits
    down, across = plan.scale
    return Capture(
        layer=site.layer.name,
        type=site.layer.type,
        index=site.layer.index,
        kind=site.kind,
        call=site.call,
        key=site.key,
        shape=list(shape),
        layout=drawing.layout,
        maps=len(drawing.stats),
        file=file,
        grid={
            "nrow": plan.columns,
            "padding": plan.padding,
            "tile": list(plan.tile),
            "scale": down if down == across else [down, across],
        },
        normalize=limits.mode,
        range=None if limits.shared is None else list(limits.shared),
        channels=drawing.channels,
        slices=list(drawing.slices) if drawing.slices[1] > 1 else None,
        collapsed={str(leader): group for leader, group in drawing.groups.items()} or None,
        reduce=drawing.reduce,
        overlay=drawing.overlay,
        **stats.overall(drawing.stats, values or drawing.values),  # type: ignore[arg-type]
    )


def encode(drawing: Drawing, file: BinaryIO, format: str, text: dict[str, str]) -> None:
    """Write the picture to an open file: PNG by our own encoder, other formats through Pillow."""
    if format == "png":
        plan, colors = drawing.plan, drawing.palette
        png.write_png(
            file, (plan.height, plan.width), _png_rows(drawing), colors=colors.colors, text=text
        )
    elif format == "webp":
        to_image(drawing).convert("RGB").save(file, "webp", lossless=True)
    else:
        image = to_image(drawing)
        image = image if image.mode == "L" else image.convert("RGB")
        image.save(file, "jpeg", quality=95, subsampling=0, comment=_comment(text))


def to_png(drawing: Drawing) -> bytes:
    """The picture as the bytes of a PNG."""
    file = io.BytesIO()
    encode(drawing, file, "png", {})
    return file.getvalue()


def to_image(drawing: Drawing) -> Image.Image:
    """The picture as a Pillow image of mode L, P with its palette, or RGB."""
    colors = drawing.palette
    stamper = dress.stamper(drawing)
    image = Image.fromarray(grid.compose(drawing.plan, drawing.tiles, colors.pad, stamper))
    if colors.colors is not None:
        image.putpalette(colors.colors)
    return image


def caption(capture: Capture) -> dict[str, str]:
    """What a picture says of itself, in its text chunks."""
    drawn, limits = capture.channels, "each map its own"
    if capture.range is not None:
        limits = "{} to {}".format(*capture.range)
    return {
        "Software": "featviz",
        "Layer": f"{capture.layer} ({capture.type})",
        "Call": f"{capture.call} {capture.kind} {capture.key}".rstrip(),
        "Channels": _ranges(drawn if drawn is not None else range(capture.maps)),
        "Maps": _counted(capture),
        **_more(capture),
        "Range": f"{capture.normalize}: {limits}",
    }


def _counted(capture: Capture) -> str:
    """`16 of 64 (--max-maps)`; what shares a tile is drawn too."""
    drawn = capture.maps if capture.channels is None else len(capture.channels)
    hidden = sum(len(group) - 1 for group in (capture.collapsed or {}).values())
    reasons = ["--max-maps"] if drawn + hidden < capture.maps else []
    reasons += ["--collapse"] if hidden else []
    return f"{drawn} of {capture.maps}" + (f" ({', '.join(reasons)})" if reasons else "")


def _more(capture: Capture) -> dict[str, str]:
    """What not every picture has."""
    found = {}
    if capture.slices is not None:
        side, held = capture.slices
        found["Slices"] = f"{side} of {held} side by side for each channel" + (
            " (--max-slices)" if side < held else ""
        )
    if capture.collapsed:
        groups = (f"{leader}: {_ranges(ids)}" for leader, ids in capture.collapsed.items())
        found["Collapsed"] = "; ".join(groups)
    if capture.reduce:
        found["Reduce"] = f"{capture.reduce} of all channels"
    if capture.overlay is not None:
        found["Overlay"] = f"{capture.overlay:g} over the input"
    return found


def _png_rows(drawing: Drawing) -> Iterable[Bytes]:
    """The picture as the encoder takes it: a column in front, RGB side by side."""
    pad, stamper = drawing.palette.pad, dress.stamper(drawing)
    return grid.strips(drawing.plan, drawing.tiles, pad, lead=1, stamper=stamper)


def _comment(text: dict[str, str]) -> bytes:
    return "; ".join(f"{key}: {value}" for key, value in text.items()).encode()[:65_000]


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 to `0-2,5`."""
    array = np.asarray(numbers)
    breaks = np.flatnonzero(np.diff(array) != 1) + 1
    runs = np.split(array, breaks)
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)
