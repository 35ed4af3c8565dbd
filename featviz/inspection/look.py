"""The story of `look`: one image goes through a model, and one page shows what its layers make of
it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

from featviz.drawing import colormap, levels, png, stats
from featviz.drawing.drawer import Drawer
from featviz.drawing.overview import Overview, OverviewRow, OverviewTile
from featviz.drawing.picture import GridPicture
from featviz.errors import FeatvizError, UsageError
from featviz.gradients import forward_backward
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.layers import list_layers
from featviz.images import find
from featviz.layout.overrides import HintBook
from featviz.models.load import LoadedModel, ModelOptions
from featviz.models.preprocess import InputOptions, Preprocess
from featviz.pipeline.options import RunOptions
from featviz.pipeline.prepare import Prepared, find_images, prepare, read_input
from featviz.records import (
    Bytes,
    DrawOptions,
    Guess,
    Layer,
    Outcome,
    PageOptions,
    Sample,
    Site,
    Skip,
    finite,
)
from featviz.records.checking import check
from featviz.rundir import destination
from featviz.rundir.atomic import atomic
from featviz.text import by, counted, listed, quoted, safe_name

log = logging.getLogger(__name__)

MOST_STAGES = 10
"""Layers on the page where the user names none: as many as one takes in at once."""

ALIKE = 0.9
"""Correlation from which on a map looks like another that is shown already."""

_COMPARED = 64
"""Pixels a side of what is compared of a map."""

_ALL_SLICES = 2**31
_SOFTWARE = "featviz look"


Span = tuple[float | None, float | None]
"""The least and the greatest finite value; None where there is none."""


@dataclass(frozen=True)
class LookOptions:
    """All options of `look` beside the model and the image."""

    layers: str | None = None
    """Selectors; None takes one layer for each stage, at most MOST_STAGES."""
    out: Path | None = None
    """None is `look-IMAGE.png` in the current folder."""
    overwrite: bool = False
    """Replace the file at `out`, whatever it is; an earlier page of `look` is replaced anyway."""
    nul_separated: bool = False
    """`-` reads NUL-separated paths."""
    page: PageOptions = field(default_factory=PageOptions)
    inputs: InputOptions = field(default_factory=InputOptions)


@dataclass(frozen=True)
class ShownLayer:
    """A layer's most telling maps."""

    layer: str
    type: str
    index: int
    calls: int
    """How often it ran; the maps are those of the first call that gave some."""
    key: str
    """Where in its output the tensor is."""
    shape: tuple[int, ...]
    layout: str
    maps: int
    """How many it has."""
    constant: int
    """How many of them have one value everywhere, and are not shown beside others."""
    nonfinite: int
    """NaN and infinite values in all of its maps."""
    slice: tuple[int, int] | None
    """Which slice of each map is shown, and of how many, where it has several."""
    channels: tuple[int, ...]
    """The shown maps, the most telling one first; of a vector its largest numbers."""
    ranges: tuple[Span, ...]
    """The least and the greatest value of each, between which its colours run; maps of one number
    have one scale for all. Of a vector those of all its numbers."""
    tiles: Sequence[Bytes] = field(repr=False, compare=False, default=())
    """RGB [h, w, 3] of each map, not enlarged; of a vector the one strip of all its numbers."""

    @property
    def strip(self) -> bool:
        """Whether it is a vector, whose numbers are one strip."""
        return len(self.tiles) < len(self.channels) or self.layout == "vector"

    @property
    def one_scale(self) -> bool:
        """Whether its maps are single numbers, which one scale tells apart."""
        return not self.strip and self.tiles[0].shape[:2] == (1, 1)

    def as_json(self) -> dict[str, Any]:
        """All but the pixels."""
        return {k: v for k, v in vars(self).items() if k != "tiles"}


@dataclass(frozen=True)
class LookResult:
    """What the model made of the image."""

    path: Path
    model: str
    image: str
    input_shape: tuple[int, ...]
    preprocessing: str
    prediction: tuple[Guess, ...]
    layers: tuple[ShownLayer, ...]
    left_out: tuple[str, ...]
    """Stages that have no row, so that the page stays short."""
    skipped: tuple[Skip, ...]
    never_ran: tuple[str, ...]
    shown: Bytes = field(repr=False, compare=False)
    """What the model saw, RGB [H, W, 3]."""
    picture: Bytes = field(repr=False, compare=False)
    """The page, RGB [H, W, 3]."""

    def as_json(self) -> dict[str, Any]:
        """For programs: all but the pixels."""
        return {
            "file": str(self.path),
            "model": self.model,
            "image": self.image,
            "input": {"shape": self.input_shape, "preprocessing": self.preprocessing},
            "prediction": [asdict(guess) for guess in self.prediction],
            "layers": [row.as_json() for row in self.layers],
            "left_out": self.left_out,
            "skipped": [asdict(skip) for skip in self.skipped],
            "never_ran": self.never_ran,
        }


def look(
    model: ModelOptions | LoadedModel,
    images: Sequence[str],
    options: LookOptions,
    stdin: BinaryIO | None = None,
) -> LookResult:
    """Draw one page: the input, the prediction, and the most telling maps of each layer.

    Args:
        images: as for `run`; of several the first one is shown.
        stdin: where the list of images is read for the argument `-`; None takes the process's own.

    Raises:
        FeatvizError: a bad option, no such model, layer or image, nothing that can be drawn, or the
            file cannot be written; nothing was written.
    """
    check(options.page)
    colormap.check_cmap(options.page.cmap)
    run = RunOptions(
        layers=options.layers,
        nul_separated=options.nul_separated,
        draw=DrawOptions(cmap=options.page.cmap, max_slices=_ALL_SLICES),
        inputs=options.inputs,
    )
    found = find_images(images, run, stdin)
    out = _place(model, found, options)
    prepared = prepare(model, found, run)
    if len(prepared.samples) > 1:
        first = quoted(prepared.samples[0].name)
        log.info("the first of %d images, %s; name another one", len(prepared.samples), first)
    result = _shown(_name_of(model, prepared.model), prepared, options, out)
    with atomic(out) as file:
        size = result.picture.shape[:2]
        rows = [result.picture.reshape(size[0], -1)]
        png.write_png(file, size, rows, text={"Software": _SOFTWARE})
    return result


def _place(
    model: ModelOptions | LoadedModel, found: Sequence[Sample], options: LookOptions
) -> Path:
    """Where the page is written, which is refused before the model is loaded if it must not be."""
    out = options.out or Path(safe_name(f"look-{Path(found[0].name).stem}.png"))
    if out.suffix.lower() != ".png":
        raise UsageError(f"--out {quoted(str(out))}: look writes PNG", f"{out.stem}.png")
    names = (None,) if isinstance(model, LoadedModel) else (model.spec, model.arch, model.weights)
    inputs = [*find.files_of(found), *destination.model_files(*names)]
    destination.check_apart(out, "--out", inputs)
    destination.check_picture(out, _SOFTWARE, "look", options.overwrite)
    return out


def _name_of(model: ModelOptions | LoadedModel, loaded: LoadedModel) -> str:
    if isinstance(model, LoadedModel):
        return type(loaded.module).__name__
    return Path(model.spec).name + " (random weights)" * (loaded.source.get("weights") == "none")


def _shown(name: str, prepared: Prepared, options: LookOptions, out: Path) -> LookResult:
    """Show the image to the model, and draw the page."""
    preprocess, sample = prepared.model.preprocess, prepared.samples[0]
    decoded, args = read_input(sample, preprocess, options.inputs)
    chosen, left_out = _on_page(prepared.layers, options)
    with in_eval_mode(prepared.model.module):
        eye = _Eye(prepared.hint_book(args), Drawer(prepared.options.draw), options.page, chosen)
        root = list_layers(prepared.model.module)[0]
        outcome, recorder = forward_backward.run(
            prepared.model,
            prepared.plan,
            args,
            eye.book,
            [*chosen, *([] if root in chosen else [root])],
            eye.take,
        )
    never_ran = tuple(layer.name for layer in recorder.never_ran)
    rows = tuple(replace(row, calls=recorder.calls[row.layer]) for row in eye.rows.values())
    if not rows:
        raise _nothing(recorder.skipped, never_ran)
    _warn(rows, left_out)
    shown = _input_picture(preprocess, args)
    shape = tuple(args[0].shape)
    drawn, words = eye.output_pictures(outcome), preprocess.words_for(decoded.words)
    page = Overview(
        title=name,
        subtitle=f"{sample.name}   input {by(shape)}",
        pictures=[("input", shown), *drawn],
        bars=[(guess.title, guess.probability) for guess in outcome.prediction],
        remarks=_remarks(eye, bool(drawn), words),
        rows=[_words(row) for row in rows],
        key=_key(options.page),
        cmap=options.page.cmap,
    )
    return LookResult(
        out,
        name,
        sample.name,
        shape,
        words,
        outcome.prediction,
        rows,
        tuple(layer.name for layer in left_out),
        tuple(recorder.skipped),
        never_ran,
        shown,
        page.draw(),
    )


def _on_page(layers: Sequence[Layer], options: LookOptions) -> tuple[list[Layer], list[Layer]]:
    """The layers that get a row, and the stages that get none: with the first and the last, evenly
    spread ones stay."""
    if options.layers is not None or len(layers) <= MOST_STAGES:
        return list(layers), []
    kept = {round(place) for place in np.linspace(0, len(layers) - 1, MOST_STAGES)}
    return (
        [layer for place, layer in enumerate(layers) if place in kept],
        [layer for place, layer in enumerate(layers) if place not in kept],
    )


def _input_picture(preprocess: Preprocess, args: Sequence[Tensor]) -> Bytes:
    """What the model saw, RGB; of a clip or a volume the slice in the middle."""
    if args[0].ndim == 5:
        pictures = preprocess.pictures(args[:1])
        return _rgb(levels.pixels(pictures[len(pictures) // 2][0]))
    return _rgb(levels.pixels(preprocess.shown(args)[0]))


def _rgb(pixels: Bytes) -> Bytes:
    return np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels


class _Eye:
    """The sink of the hooks: keeps the most telling maps of each layer, and the model's output
    where that is a picture."""

    def __init__(
        self, book: HintBook, drawer: Drawer, options: PageOptions, layers: Sequence[Layer]
    ) -> None:
        self.book, self.drawer, self.options = book, drawer, options
        self.rows: dict[str, ShownLayer] = {}
        """By name of the layer, in the order in which they ran."""
        self.outputs: list[tuple[int, ...]] = []
        """Shapes of the tensors of the model's output."""
        self._picture: Bytes | None = None
        self._wanted = {layer.name for layer in layers}

    def take(self, site: Site, tensor: Tensor) -> None:
        """Draw the first maps that a layer gives; numbers only where it gives no maps."""
        if not site.layer.name:
            self._take_output(tensor)
        before = self.rows.get(site.layer.name)
        if site.layer.name not in self._wanted or (before is not None and not before.strip):
            return
        picture = self.drawer.draw(site, tensor, self.book.at(site, tensor))[""]
        if before is None or not picture.strip:
            self.rows[site.layer.name] = _telling(site, tensor, picture, self.options)

    def output_pictures(self, outcome: Outcome) -> list[tuple[str, Bytes]]:
        """The model's output with its caption, if it is a picture."""
        if self._picture is None or outcome.prediction:
            return []
        return [(f"output {by(self.outputs[0])}", self._picture)]

    def _take_output(self, tensor: Tensor) -> None:
        if tensor.is_nested:
            return
        self.outputs.append(tuple(tensor.shape))
        is_picture = tensor.ndim == 4 and len(tensor) == 1 and tensor.shape[1] in (1, 3)
        if is_picture and len(self.outputs) == 1 and min(tensor.shape[2:]) >= _SMALLEST_PICTURE:
            self._picture = _as_picture(tensor[0])


_SMALLEST_PICTURE = 8
"""Pixels of the shorter side from which an output of one or three channels is a picture."""


def _as_picture(values: Tensor) -> Bytes | None:
    """Values [C, H, W] as pixels: 0..1 as they are, others from the least to the greatest."""
    values = values.detach().float()
    if not bool(values.isfinite().all()):
        return None
    low, high = float(values.min()), float(values.max())
    if low < -0.05 or high > 1.05:
        values = (values - low) / max(high - low, 1e-30)
    return _rgb(levels.pixels(values.clamp(0, 1)))


def ranked(numbers: np.ndarray, by: str) -> list[int]:
    """Channels by how much their maps tell, the most telling one first.

    Maps of one value everywhere are left out where others are; those without a finite value come
    last, and equal ones in their order.

    Args:
        numbers: statistics [C, 6] in the order of `records.STAT_COLUMNS`.
        by: `deviation` or `value`; where each map is constant, the mean decides.
    """
    flat = _flat(numbers)
    column = stats.MEAN if by == "value" or flat.all() else stats.STD
    keys = np.nan_to_num(-numbers[:, column], nan=np.inf)
    order = [int(channel) for channel in np.argsort(keys, kind="stable")]
    return [channel for channel in order if not flat[channel]] or order


def unlike(maps: Bytes, order: Sequence[int], count: int) -> list[int]:
    """The first `count` channels of an order of which no two look alike, and none is blank; where
    there are fewer, the others follow in their order.

    Args:
        maps: levels [C, H, W], of which every so many-th is compared where they are large.
    """
    step = max(1, max(maps.shape[1:]) // _COMPARED)
    taken, alike = [], []
    rows = np.empty((0, maps[0, ::step, ::step].size), np.float32)
    for channel in order:
        row = maps[channel, ::step, ::step].ravel().astype(np.float32)
        row -= row.mean()
        length = float(np.linalg.norm(row))
        row /= max(length, 1e-6)
        if length < 1e-6 or (len(rows) and float((rows @ row).max()) >= ALIKE):
            alike.append(channel)
            continue
        taken.append(channel)
        rows = np.vstack([rows, row])
        if len(taken) == count:
            break
    return (taken + alike)[:count]


def _flat(numbers: np.ndarray) -> np.ndarray:
    low, high, nonfinite = numbers.T[[stats.MIN, stats.MAX, stats.NONFINITE]]
    flat: np.ndarray = levels.is_flat(low, high) & (nonfinite == 0)
    return flat


def _telling(site: Site, tensor: Tensor, picture: GridPicture, options: PageOptions) -> ShownLayer:
    """The most telling maps of a tensor that is drawn."""
    numbers = picture.stats
    colors, side = colormap.table(picture.palette), picture.slices[0]
    order, middles = ranked(numbers, options.by), picture.tiles[:][side // 2 :: side]
    channels = order[: options.maps] if picture.strip else unlike(middles, order, options.maps)
    places = [channel * side + side // 2 for channel in channels]
    if picture.strip:
        tiles = [colors[np.concatenate(list(picture.tiles[:]), axis=1)]]
    else:
        tiles = [colors[picture.tiles[place : place + 1][0]] for place in places]
    return ShownLayer(
        layer=site.layer.name,
        type=site.layer.type,
        index=site.layer.index,
        calls=1,
        key=site.key,
        shape=tuple(tensor.shape),
        layout=picture.layout,
        maps=len(numbers),
        constant=0 if picture.values == 1 else int(_flat(numbers).sum()),
        nonfinite=int(numbers[:, stats.NONFINITE].sum()),
        slice=(side // 2, side) if side > 1 else None,
        channels=tuple(channels),
        ranges=_ranges(numbers if picture.strip else numbers[channels], picture.strip),
        tiles=tiles,
    )


def _ranges(numbers: np.ndarray, together: bool) -> tuple[Span, ...]:
    low, high = numbers[:, stats.MIN], numbers[:, stats.MAX]
    if together:
        low, high = np.nanmin(low, keepdims=True), np.nanmax(high, keepdims=True)
    return tuple((finite(float(a)), finite(float(b))) for a, b in zip(low, high, strict=True))


def _nothing(skipped: Sequence[Skip], never_ran: Sequence[str]) -> FeatvizError:
    why = [f"never ran: {listed(never_ran, 3)}"] if never_ran else []
    if skipped:
        words = [f"{skip.layer or skip.type} ({skip.reason})" for skip in skipped]
        why.append(f"skipped: {listed(words, 3)}")
    return FeatvizError(
        f"no picture was drawn; {'; '.join(why) or 'no layer was taken'}",
        "--layers takes others; `featviz layers MODEL` lists them, with shapes and calls",
    )


def _warn(rows: Sequence[ShownLayer], left_out: Sequence[Layer]) -> None:
    for row in rows:
        if row.nonfinite:
            where, count = row.layer or row.type, row.nonfinite
            log.warning("%s holds %d NaN or infinite values, shown in magenta", where, count)
    if left_out:
        log.info("%d of %d stages; --layers takes others", len(rows), len(rows) + len(left_out))


# The words of the page


def _remarks(eye: _Eye, drawn: bool, preprocessing: str) -> list[str]:
    """The shapes of an output that is neither classes nor drawn, and how the image went in."""
    shapes = [f"output {listed([by(size) for size in eye.outputs], 3)}", ""]
    return [*([] if drawn else shapes), *re.split(r", (?![^\[(]*[\])])", preprocessing)]


def _words(row: ShownLayer) -> OverviewRow:
    lines = [row.type, by(row.shape)]
    if row.slice is not None:
        lines.append(f"middle of {row.slice[1]} slices")
    if row.one_scale:
        lines.append("one scale for all")
    if row.calls > 1:
        lines.append(f"call 1 of {row.calls}")
    if row.constant:
        lines.append(f"{row.constant} of {row.maps} constant")
    if row.nonfinite:
        lines.append(f"{row.nonfinite} NaN or infinite")
    return OverviewRow(row.layer or row.type, lines, list(_tiles(row)), row.strip)


def _tiles(row: ShownLayer) -> Iterator[OverviewTile]:
    if row.strip:
        words = f"largest at {', '.join(map(str, row.channels))}"
        yield OverviewTile(f"{counted(row.maps, 'number')}, {words}", _span(row, 0), row.tiles[0])
        return
    for place, channel in enumerate(row.channels):
        yield OverviewTile(str(channel), _span(row, place), row.tiles[place])


def _span(row: ShownLayer, place: int) -> str:
    low, high = row.ranges[place]
    if low is None or high is None:
        return ""
    return _brief(low) if low == high else f"{_brief(low)} … {_brief(high)}"


def _brief(value: float) -> str:
    """A number in a few letters: 0.013, 1.2, 350, 2e-06."""
    return f"{value:.0f}" if 100 <= abs(value) < 1e5 else f"{value:.2g}"


def _key(options: PageOptions) -> str:
    telling = "vary most" if options.by == "deviation" else "have the highest mean"
    return f"of each layer the maps that {telling}, with their channels and values"
