"""The story of `look`: one image goes through a model, and one page shows what its layers make of
it."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

from featviz.drawing import colormap, levels, png, scan
from featviz.drawing.drawer import Drawer
from featviz.drawing.overview import Overview
from featviz.errors import FeatvizError, LayoutError, UsageError
from featviz.gradients import forward_backward
from featviz.hooks.capture import Recorder
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.layers import list_layers
from featviz.inspection.places import check_places, software
from featviz.inspection.shown import ShownLayer, telling, words_on
from featviz.layout import to_floats
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
    Site,
    Skip,
)
from featviz.records.checking import check
from featviz.rundir.atomic import atomic
from featviz.text import by, listed, quoted, safe_name

log = logging.getLogger(__name__)

MOST_STAGES = 10
"""Layers on the page where the user names none: as many as one takes in at once."""

_LONGEST = 2**16 - 1
"""Pixels of the longer side of a page; matplotlib writes on none that is longer."""

_ALL_SLICES = 2**31


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
    # numba is loaded while the model is
    Thread(target=scan.compiled, name="featviz-loops", daemon=True).start()
    check(options.page)
    colormap.check_cmap(options.page.cmap)
    run = RunOptions(
        layers=options.layers,
        nul_separated=options.nul_separated,
        draw=DrawOptions(cmap=options.page.cmap, max_slices=_ALL_SLICES),
        inputs=options.inputs,
    )
    found = find_images(images, run, stdin)
    out = options.out or Path(safe_name(f"look-{Path(found[0].name).stem}.png"))
    check_places("look", [out], model, found, options.overwrite)
    prepared = prepare(model, found, run)
    if len(prepared.samples) > 1:
        first = quoted(prepared.samples[0].name)
        log.info("the first of %d images, %s; name another one", len(prepared.samples), first)
    result = _shown(_name_of(model, prepared.model), prepared, options, out)
    with atomic(out) as file:
        size = result.picture.shape[:2]
        rows = [result.picture.reshape(size[0], -1)]
        png.write_png(file, size, rows, text={"Software": software("look")})
    return result


def _name_of(model: ModelOptions | LoadedModel, loaded: LoadedModel) -> str:
    if isinstance(model, LoadedModel):
        return type(loaded.module).__name__
    return Path(model.spec).name + " (random weights)" * (loaded.source.get("weights") == "none")


def _shown(name: str, prepared: Prepared, options: LookOptions, out: Path) -> LookResult:
    """Show the image to the model, and draw the page."""
    preprocess, sample = prepared.model.preprocess, prepared.samples[0]
    decoded, args = read_input(sample, preprocess, options.inputs)
    chosen, left_out = _on_page(prepared.layers, options)
    eye = _Eye(prepared, args, chosen, options.page)
    outcome, recorder = eye.look(args)
    never_ran = tuple(layer.name for layer in recorder.never_ran)
    rows = tuple(replace(row, calls=recorder.calls[row.layer]) for row in eye.rows.values())
    if not rows:
        raise _nothing(recorder.skipped, never_ran)
    _warn(rows, left_out)
    result = LookResult(
        path=out,
        model=name,
        image=sample.name,
        input_shape=tuple(args[0].shape),
        preprocessing=preprocess.words_for(decoded.words),
        prediction=outcome.prediction,
        layers=rows,
        left_out=tuple(layer.name for layer in left_out),
        skipped=tuple(recorder.skipped),
        never_ran=never_ran,
        shown=_input_picture(preprocess, args),
        picture=np.empty((0, 0, 3), np.uint8),
    )
    page = _page(result, eye, options.page)
    _check_size(page)
    return replace(result, picture=page.draw())


def _page(result: LookResult, eye: _Eye, options: PageOptions) -> Overview:
    pictures = [("input", result.shown)]
    if eye.picture is not None and not result.prediction:
        pictures.append((f"output {by(eye.outputs[0])}", eye.picture))
    return Overview(
        title=result.model,
        subtitle=f"{result.image}   input {by(result.input_shape)}",
        pictures=pictures,
        bars=[(guess.title, guess.probability) for guess in result.prediction],
        remarks=_remarks(eye.outputs if len(pictures) == 1 else [], result.preprocessing),
        rows=[words_on(row) for row in result.layers],
        key=_key(options),
        cmap=options.cmap,
    )


def _check_size(page: Overview) -> None:
    height, width = page.size
    if max(height, width) > _LONGEST or height * width > png.MAX_PIXELS:
        raise UsageError(
            f"the picture would have {by((width, height))} pixels, which is too many",
            "--maps shows fewer of each layer, and --layers takes fewer",
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
        self,
        prepared: Prepared,
        args: Sequence[Tensor],
        layers: Sequence[Layer],
        options: PageOptions,
    ) -> None:
        self.prepared, self.layers, self.options = prepared, layers, options
        self.book, self.drawer = prepared.hint_book(args), Drawer(prepared.options.draw)
        self.rows: dict[str, ShownLayer] = {}
        """By name of the layer, in the order in which they ran."""
        self.outputs: list[tuple[int, ...]] = []
        """Shapes of the tensors of the model's output."""
        self.picture: Bytes | None = None
        """The first of them, RGB [H, W, 3], where it is a picture."""
        self._wanted = {layer.name for layer in layers}

    def look(self, args: Sequence[Tensor]) -> tuple[Outcome, Recorder]:
        """Show the model an input, with the layers hooked and the model itself."""
        model, plan = self.prepared.model, self.prepared.plan
        root = list_layers(model.module)[0]
        layers = [*self.layers, *([] if root in self.layers else [root])]
        with in_eval_mode(model.module):
            return forward_backward.run(model, plan, args, self.book, layers, self.take)

    def take(self, site: Site, tensor: Tensor) -> None:
        """Draw the first maps that a layer gives; numbers only where it gives no maps."""
        if not site.layer.name:
            self._take_output(tensor)
        before = self.rows.get(site.layer.name)
        if site.layer.name not in self._wanted or (before is not None and not before.strip):
            return
        picture = self.drawer.draw(site, tensor, self.book.at(site, tensor))[""]
        if before is None or not picture.strip:
            self.rows[site.layer.name] = telling(site, tensor, picture, self.options)

    def _take_output(self, tensor: Tensor) -> None:
        if tensor.is_nested:
            return
        self.outputs.append(tuple(tensor.shape))
        is_picture = tensor.ndim == 4 and len(tensor) == 1 and tensor.shape[1] in (1, 3)
        if is_picture and len(self.outputs) == 1 and min(tensor.shape[2:]) >= _SMALLEST_PICTURE:
            self.picture = _as_picture(tensor)


_SMALLEST_PICTURE = 8
"""Pixels of the shorter side from which an output of one or three channels is a picture."""


def _as_picture(output: Tensor) -> Bytes | None:
    """An output [1, C, H, W] as pixels: 0..1 as they are, others from the least to the greatest;
    None where they are no finite real numbers, or not dense."""
    try:
        values = to_floats(output.detach())[0]
    except LayoutError:
        return None
    if not bool(values.isfinite().all()):
        return None
    low, high = float(values.min()), float(values.max())
    if low < -0.05 or high > 1.05:
        values = (values - low) / max(high - low, 1e-30)
    return _rgb(levels.pixels(values.clamp(0, 1)))


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


def _remarks(outputs: Sequence[tuple[int, ...]], preprocessing: str) -> list[str]:
    """The shapes of an output that is neither classes nor drawn, and how the image went in."""
    shapes = listed([by(shape) for shape in outputs], 3)
    steps = re.split(r", (?![^\[(]*[\])])", preprocessing)
    return [*([f"output {shapes}", ""] if shapes else []), "preprocessing", *steps]


def _key(options: PageOptions) -> str:
    telling = "vary most" if options.by == "deviation" else "have the highest mean"
    return f"of each layer the maps that {telling}, one of those that look alike"
