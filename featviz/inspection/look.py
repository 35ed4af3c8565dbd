"""The story of `look`: one image goes through a model, and one page shows its layers' maps."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from featviz.drawing import colormap, values
from featviz.drawing.drawer import draw, magnitude_and_phase
from featviz.drawing.page import Panel, Row, draw_page
from featviz.drawing.picture import GridPicture, write_png
from featviz.drawing.values import to_pixels
from featviz.errors import NOTHING_DRAWN, FeatvizError, LayoutError, UsageError
from featviz.hooks.layers import list_layers
from featviz.layout import to_floats
from featviz.models.load import LoadedModel
from featviz.options import DrawOptions, ModelOptions, RunOptions
from featviz.options.commands import LookOptions
from featviz.records import Bytes, CaptureSite, ClassScore, Floats, Layer, Sample, Skip, finite
from featviz.run.prepare import Prepared, files_read, find_images, prepare, read_input
from featviz.rundir.place import check_apart, check_file, picture_of, write_file
from featviz.text import by, counted, listed, quoted, safe_name

log = logging.getLogger(__name__)

MOST_STAGES = 10
_SMALLEST_PICTURE = 8  # pixels of the shorter side from which an output is shown as a picture
ALIKE = 0.9  # correlation from which on a map looks like another that is shown already
_COMPARED = 64
Span = tuple[float | None, float | None]
"""The least and the greatest finite value; None where there is none."""


@dataclass(frozen=True)
class ShownLayer:
    """A layer's most telling maps."""

    layer: str
    type: str
    index: int
    calls: int
    """How often it ran; the maps are those of the first call that gave some."""
    key: str
    shape: tuple[int, ...]
    layout: str
    maps: int
    constant: int
    """How many of them have one value everywhere, and are not shown beside others."""
    nonfinite: int
    slice: tuple[int, int] | None
    """Which slice of each map is shown, and of how many, where it has several."""
    channels: tuple[int, ...]
    """The shown maps, the most telling one first; of a vector its largest numbers."""
    ranges: tuple[Span, ...]
    """Of each shown map, or of all numbers of a vector."""
    strip: bool
    """Its numbers are one strip: those of a vector, or of maps that are all constant."""
    tiles: Sequence[Bytes] = field(repr=False, compare=False, default=())
    """RGB [h, w, 3] of each map, not enlarged; of a vector the one strip of all its numbers."""


@dataclass(frozen=True)
class LookResult:
    """The page of one image, and what it shows."""

    path: Path
    model: str
    name: str
    input_shape: tuple[int, ...]
    preprocessing: str
    prediction: tuple[ClassScore, ...]
    layers: tuple[ShownLayer, ...]
    left_out: tuple[str, ...]
    skipped: tuple[Skip, ...]
    never_ran: tuple[str, ...]
    shown: Bytes = field(repr=False, compare=False)
    picture: Bytes = field(repr=False, compare=False, default_factory=lambda: np.empty(0, np.uint8))

    def as_json(self) -> dict[str, Any]:
        """For programs: all but the pixels."""
        rows = [{k: v for k, v in vars(row).items() if k != "tiles"} for row in self.layers]
        return {
            "file": str(self.path),
            "model": self.model,
            "image": self.name,
            "input": {"shape": self.input_shape, "preprocessing": self.preprocessing},
            "prediction": [asdict(guess) for guess in self.prediction],
            "layers": rows,
            "left_out": self.left_out,
            "skipped": [asdict(skip) for skip in self.skipped],
            "never_ran": self.never_ran,
        }


def look(
    model: ModelOptions | LoadedModel, images: Sequence[str], options: LookOptions
) -> LookResult:
    """Draw one page: the input, the prediction, and the most telling maps of each layer.

    Args:
        images: as for `run`; of several the first one is shown.
    """
    colormap.check_cmap(options.cmap)
    run = RunOptions(
        layers=options.layers,
        draw=DrawOptions(cmap=options.cmap, max_slices=2**31),
        inputs=options.inputs,
    )
    found = find_images(images, run)
    spec = model.spec if isinstance(model, ModelOptions) else type(model.module).__name__
    name = Path(spec).name
    short = re.sub(r"\.(pth|pt2?|ckpt|bin|safetensors|py)\b", "", name).replace(":", "-")
    out = options.out or Path(safe_name(f"look-{short}-{Path(found[0].name).stem}.png"))
    check_files("look", [out], model, found, options.overwrite)
    prepared = prepare(model, found, run)
    if len(prepared.samples) > 1:
        first = quoted(prepared.samples[0].name)
        log.info("the first of %d images, %s; name another one", len(prepared.samples), first)
    if prepared.model.source.get("weights") == "none":
        name += " (random weights)"
    result = _see(name, prepared, options, out)
    with write_file(out) as file:
        size = result.picture.shape[:2]
        rows = [result.picture.reshape(size[0], -1)]
        write_png(file, size, rows, text={"Software": "featviz look"})
    return result


def check_files(
    command: str,
    paths: Iterable[Path],
    model: ModelOptions | LoadedModel,
    samples: Sequence[Sample],
    overwrite: bool,
) -> None:
    """Refuse bad files for the pictures of `look` or `cam`, before the model is loaded; with
    `overwrite` any file may go."""
    inputs = files_read(model, samples)
    for path in paths:
        if path.suffix.lower() != ".png":
            other = quoted(str(path.with_suffix(".png")))
            raise UsageError(f"--out {quoted(str(path))}: {command} writes PNG", f"--out {other}")
        check_apart(path, "--out", inputs)
        check_file(path, picture_of(command), overwrite=overwrite)


def _see(name: str, prepared: Prepared, options: LookOptions, out: Path) -> LookResult:
    """Show the image to the model: what its layers make of it, and the page of that."""
    chosen, left_out = list(prepared.layers), list[Layer]()
    if options.layers is None and len(chosen) > MOST_STAGES:  # evenly spread ones stay
        kept = {round(place) for place in np.linspace(0, len(chosen) - 1, MOST_STAGES)}
        left_out = [layer for place, layer in enumerate(chosen) if place not in kept]
        chosen = [layer for place, layer in enumerate(chosen) if place in kept]
    image = read_input(prepared.samples[0], prepared.model.preprocess, prepared.options.inputs)
    hints = prepared.hints(image.args)
    wanted = {layer.name for layer in chosen}
    rows: dict[str, ShownLayer] = {}
    shapes: list[str] = []
    shown = image.preprocess.shown(image.args)[0]
    if image.args[0].ndim == 5:  # of a clip or a volume the slice in the middle
        slices = image.preprocess.pictures(image.args[:1])
        shown = slices[len(slices) // 2][0]
    pictures = [("input", _rgb(to_pixels(shown)))]

    def take(site: CaptureSite, tensor: Tensor) -> None:
        """The sink of the hooks: the first maps that a layer gives; numbers only where it gives no
        maps."""
        if not site.layer.name and not tensor.is_nested:
            if not shapes:
                pictures.extend(_output_picture(site.key, tensor, hints.input_shape[-2:]))
            shapes.append(by(tensor.shape))
        before = rows.get(site.layer.name)
        if site.layer.name in wanted and (before is None or before.strip):
            known = hints.of_tensor(site, tensor)
            if tensor.is_complex():
                site, tensor, known = next(magnitude_and_phase(site, tensor, known, DrawOptions()))
            picture = draw(prepared.options.draw, site, tensor, known)[""]
            if before is None or not picture.strip:
                rows[site.layer.name] = _telling(site, tensor, picture, options)

    root = list_layers(prepared.model.module)[0]
    with prepared.watched(chosen if root in chosen else [*chosen, root]) as show:
        outcome, recorder = show(image.args, hints, take)
    never_ran = tuple(layer.name for layer in recorder.never_ran)
    if not rows:
        why = [f"never ran: {listed(never_ran, 3)}"] if never_ran else []
        if recorder.skipped:
            words = [f"{skip.layer or skip.type} ({skip.reason})" for skip in recorder.skipped]
            why.append(f"skipped: {listed(words, 3)}")
        raise FeatvizError(f"no picture was drawn; {'; '.join(why)}", NOTHING_DRAWN)
    for row in rows.values():
        if row.nonfinite:
            many = f"{row.layer or row.type} holds {row.nonfinite} NaN or infinite values"
            log.warning("%s, shown in magenta", many)
    if left_out:
        log.info("%d of %d stages; --layers takes others", len(rows), len(rows) + len(left_out))
    result = LookResult(
        path=out,
        model=name,
        name=prepared.samples[0].name,
        input_shape=tuple(image.args[0].shape),
        preprocessing=image.words,
        prediction=outcome.prediction,
        layers=tuple(replace(row, calls=recorder.calls[row.layer]) for row in rows.values()),
        left_out=tuple(layer.name for layer in left_out),
        skipped=tuple(recorder.skipped),
        never_ran=never_ran,
        shown=pictures[0][1],
    )
    pictures = pictures[:1] if result.prediction else pictures
    remarks = [f"output {listed(shapes, 3)}", ""] if shapes and not pictures[1:] else []
    page = draw_page(
        title=name,
        subtitle=f"{result.name}   input {by(result.input_shape)}",
        pictures=pictures,
        bars=[(guess.title, guess.probability) for guess in result.prediction],
        remarks=[*remarks, "preprocessing", *re.split(r", (?![^\[(]*[\])])", image.words)],
        rows=[words_on(row) for row in result.layers],
        key="the maps of each layer that vary most; near-duplicates are shown once",
        cmap=options.cmap,
    )
    return replace(result, picture=page)


def _rgb(pixels: Bytes) -> Bytes:
    return np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels


def _output_picture(key: str, output: Tensor, size: Sequence[int]) -> list[tuple[str, Bytes]]:
    """An output [1, C, H, W] with its caption: one or three channels as pixels, 0..1 as they are
    and others from the least to the greatest; scores of a segmentation as the likeliest class, in
    colours that mean nothing. Empty where it is neither."""
    shape = tuple(output.shape)
    if len(shape) != 4 or shape[0] != 1 or min(shape[2:]) < _SMALLEST_PICTURE:
        return []
    named = key in ("logits", "out") and shape[1] > 1  # by Hugging Face and torchvision
    classes = named or (shape[1] not in (1, 3) and shape[2:] == tuple(size))
    if not (classes or shape[1] in (1, 3)):
        return []
    try:
        numbers = to_floats(output.detach())[0]
    except LayoutError:
        return []
    if not numbers.isfinite().all():
        return []
    if classes:
        colors, likeliest = colormap.ramp("turbo"), numbers.argmax(0).cpu().numpy()
        return [(f"classes {by(shape)}", colors[likeliest * 97 % len(colors)])]
    low, high = float(numbers.min()), float(numbers.max())
    if low < -0.05 or high > 1.05:
        numbers = (numbers - low) / max(high - low, 1e-30)
    return [(f"output {by(shape)}", _rgb(to_pixels(numbers.clamp(0, 1))))]


def _telling(
    site: CaptureSite, tensor: Tensor, picture: GridPicture, options: LookOptions
) -> ShownLayer:
    """The most telling maps of a tensor that is drawn."""
    numbers = picture.stats
    colors, side = colormap.table(picture.palette), picture.slices[0]
    order, levels = ranked(numbers), picture.tiles[:]
    limits: Any = numbers[:, [values.MIN, values.MAX]]
    if picture.strip:  # one for all numbers together
        channels, tiles = order[: options.maps], [colors[np.concatenate(list(levels), axis=1)]]
        known = limits[np.isfinite(limits).all(1)]
        limits = [(known[:, 0].min(), known[:, 1].max()) if len(known) else (np.nan, np.nan)]
    else:
        middles = levels[side // 2 :: side]
        channels = unlike(middles, order, options.maps)
        tiles = [colors[middles[channel]] for channel in channels]
        limits = limits[channels]
    return ShownLayer(
        layer=site.layer.name,
        type=site.layer.type,
        index=site.layer.index,
        calls=1,
        key=site.key,
        shape=tuple(tensor.shape),
        layout=picture.layout,
        maps=len(numbers),
        constant=0 if picture.values == 1 else int(values.is_constant(numbers).sum()),
        nonfinite=int(numbers[:, values.NONFINITE].sum()),
        slice=(side // 2, side) if side > 1 else None,
        channels=tuple(channels),
        ranges=tuple((finite(float(low)), finite(float(high))) for low, high in limits),
        strip=picture.strip,
        tiles=tiles,
    )


def ranked(numbers: Floats) -> list[int]:
    """Channels by how much their maps vary, from statistics [C, 6], or by the mean where all maps
    are constant. Constant maps are left out where others are; those without a finite value come
    last, and equal ones in their order."""
    constant = values.is_constant(numbers)
    column = values.MEAN if constant.all() else values.STD
    keys = np.nan_to_num(-numbers[:, column], nan=np.inf)
    order = [int(channel) for channel in np.argsort(keys, kind="stable")]
    return [channel for channel in order if not constant[channel]] or order


def unlike(maps: Bytes, order: Sequence[int], count: int) -> list[int]:
    """The first `count` channels of an order of which no two look alike, and none is blank, in
    levels [C, H, W]; where there are fewer, the others follow in their order."""
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


def words_on(row: ShownLayer) -> Row:
    """A layer's row on the page."""
    remarks = {
        f"middle of {row.slice[1] if row.slice else 0} slices": row.slice,
        "one scale for all": not row.strip and row.tiles[0].shape[:2] == (1, 1),
        f"call 1 of {row.calls}": row.calls > 1,
        f"{row.constant} of {row.maps} constant": row.constant,
        f"{row.nonfinite} NaN or infinite": row.nonfinite,
    }
    lines = [row.type, by(row.shape), *(words for words, holds in remarks.items() if holds)]
    if row.strip:
        low, high = row.ranges[0]
        words = "all equal" if low == high else f"largest at {', '.join(map(str, row.channels))}"
        numbers = f"{counted(row.maps, 'number')}, {words}"
        tiles = [Panel(numbers, row.tiles[0], note=_span(row.ranges[0]))]
    else:
        tiles = [
            Panel(str(channel), tile, note=_span(ends))
            for channel, ends, tile in zip(row.channels, row.ranges, row.tiles, strict=True)
        ]
    return row.layer or row.type, lines, tiles, row.strip


def _span(ends: Span) -> str:
    low, high = ends
    if low is None or high is None:
        return ""
    first, last = _brief(low), _brief(high)
    return f"{first} … {last}" if first != last else "≈" * (low != high) + first


def _brief(value: float) -> str:
    """A number in a few letters, as 0.013, 1.2, 350, 2e-6: with a power of ten below 0.01 and from
    100000 on."""
    if value == 0 or 0.01 <= abs(value) < 1e5:
        return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"
    base, _, power = f"{value:.1e}".partition("e")
    return f"{float(base):g}e{int(power)}"
