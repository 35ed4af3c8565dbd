"""The story of `cam`: images go through a model one by one, and class activation maps over each
show where the evidence for a class lies."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import BinaryIO

import numpy as np
from torch import Tensor

from featviz import layout
from featviz.drawing import class_maps, colormap, figure, scan
from featviz.drawing.drawer import Drawer
from featviz.drawing.figure import FigurePage, Panel
from featviz.drawing.picture import to_image
from featviz.errors import ForwardError, ImageError, UsageError
from featviz.gradients import forward_backward, pairs
from featviz.hooks.eval_mode import in_eval_mode
from featviz.inspection.explained import ImageCam, LayerCam
from featviz.inspection.places import check_places, check_png, software
from featviz.models.load import LoadedModel, ModelOptions
from featviz.models.preprocess import InputOptions
from featviz.pipeline.last_map import last_map
from featviz.pipeline.options import RunOptions
from featviz.pipeline.prepare import Prepared, find_images, ground_of, prepare, read_input, shown_of
from featviz.records import (
    FORMATS,
    ClassMapOptions,
    DrawOptions,
    PassOptions,
    Sample,
    Site,
    Skip,
)
from featviz.records.checking import check
from featviz.rundir.atomic import atomic, reported
from featviz.text import listed, printable, quoted, safe_name

log = logging.getLogger(__name__)

_OTHER_PICTURES = {".jpeg", *(f".{name}" for name in FORMATS)} - {".png"}
_NAMED = 3
"""Layers without a map that an error names."""


@dataclass(frozen=True)
class CamOptions:
    """All options of `cam` beside the model and the images."""

    layers: str | None = None
    """Selectors; None takes the last layer that gives maps (`pipeline.last_map`)."""
    out: Path | None = None
    """A folder for `cam-IMAGE.png` of each image, or a PNG file for the picture of the only one;
    None writes nothing."""
    overwrite: bool = False
    """Replace a file at `out`, whatever it is; an earlier picture of `cam` is replaced anyway."""
    nul_separated: bool = False
    """`-` reads NUL-separated paths."""
    maps: ClassMapOptions = field(default_factory=ClassMapOptions)
    inputs: InputOptions = field(default_factory=InputOptions)


def cam(
    model: ModelOptions | LoadedModel,
    images: Sequence[str],
    options: CamOptions,
    stdin: BinaryIO | None = None,
) -> Iterator[ImageCam]:
    """Draw class activation maps over images, one picture for each.

    What goes wrong with one image is in its result.

    Args:
        images: as for `run`.
        stdin: where the list of images is read for the argument `-`; None takes the process's own.

    Yields:
        Each image when its picture is written.

    Raises:
        FeatvizError: a bad option, no such model, layer or image, no layer with places, or a file
            cannot be written; nothing was written before.
    """
    Thread(target=scan.compiled, daemon=True).start()  # numba is loaded while the model is
    check(options)
    run, out = _for_run(options), options.out
    found = find_images(images, run, stdin)
    _check_place(model, found, options)
    prepared = prepare(model, found, run)
    places = {} if out is None else _places_apart(prepared.samples, out)
    if options.layers is None:
        prepared = replace(prepared, layers=[last_map(prepared)])
    drawer = Drawer(prepared.options.draw)
    cmap = colormap.resolved(options.maps.cmap, over=True, reduce=options.maps.method)
    for sample in prepared.samples:
        with in_eval_mode(prepared.model.module, gradients=True):
            result = _visit(prepared, drawer, sample, options.maps.method)
        path = places.get(sample.name)
        if path is not None and result.error is None:
            _write(result, path, cmap)
            result = replace(result, path=path)
        yield result


def _for_run(options: CamOptions) -> RunOptions:
    maps = options.maps
    return RunOptions(
        layers=options.layers,
        nul_separated=options.nul_separated,
        draw=DrawOptions(
            reduce=maps.method,
            scale=1,
            overlay=maps.overlay,
            cmap=maps.cmap,
            tensor_layout=maps.tensor_layout,
        ),
        inputs=options.inputs,
        passes=PassOptions(pairs.CAPTURE, maps.target),
    )


# Where pictures are written


def _check_place(
    model: ModelOptions | LoadedModel, found: Sequence[Sample], options: CamOptions
) -> None:
    """Refuse a bad place before the model is loaded."""
    out = options.out
    if out is None:
        return
    if out.suffix.lower() in _OTHER_PICTURES:
        check_png("cam", out)
    if out.exists() and not out.is_dir() and not _is_file(out):
        raise UsageError(f"--out {quoted(str(out))} is no folder", "name a folder, or a .png file")
    check_places("cam", _places(found, out).values(), model, found, options.overwrite)


def _is_file(out: Path) -> bool:
    return out.suffix.lower() == ".png" and not out.is_dir()


def _places(samples: Sequence[Sample], out: Path) -> dict[str, Path]:
    """The picture's file of each image: its name without the ending, where no other has it."""
    if _is_file(out):
        return {sample.name: out for sample in samples}
    flat = {sample.name: sample.name.replace("/", "__") for sample in samples}
    stems = Counter(Path(name).stem for name in flat.values())
    return {
        name: out / safe_name(f"cam-{stem if stems[stem := Path(way).stem] == 1 else way}.png")
        for name, way in flat.items()
    }


def _places_apart(samples: Sequence[Sample], out: Path) -> dict[str, Path]:
    """The picture's file of each image; two in one file are refused."""
    places = _places(samples, out)
    taken: dict[Path, str] = {}
    for name, path in places.items():
        if (other := taken.setdefault(path, name)) != name:
            raise UsageError(
                f"--out {quoted(str(out))} would hold {quoted(other)} and {quoted(name)} in one "
                "picture",
                "name a folder with --out" if _is_file(out) else "name one of them",
            )
    return places


def _write(result: ImageCam, path: Path, cmap: str) -> None:
    assert result.shown is not None
    maps = ", ".join(one.name for one in result.maps)
    panels = [
        Panel(printable(f"{one.name} ({one.site.layer.type})"), one.picture, one.limits)
        for one in result.maps
    ]
    page = FigurePage(result.words, result.shown, panels, cmap, shared=False)
    with reported(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as file:
        text = {"Software": software("cam"), "Title": f"{result.words} at {maps}"}
        figure.write_figure(file, page, text)


# One image


def _visit(prepared: Prepared, drawer: Drawer, sample: Sample, method: str) -> ImageCam:
    """Show one image to the model, and go back from the target."""
    result = ImageCam(sample.name, method)
    try:
        return _explained(prepared, drawer, sample, result)
    except (ImageError, ForwardError, UsageError) as error:
        log.debug("%s failed", sample.name, exc_info=error)
        return replace(result, error=error)


def _explained(prepared: Prepared, drawer: Drawer, sample: Sample, result: ImageCam) -> ImageCam:
    preprocess = prepared.model.preprocess
    decoded, args = read_input(sample, preprocess, prepared.options.inputs)
    maker = _MapMaker(prepared, drawer, args, preprocess.window(decoded.size), result.method)
    outcome, recorder = forward_backward.run(
        prepared.model, prepared.plan, args, maker.book, prepared.layers, pairs.paired(maker.take)
    )
    if not maker.maps:
        never_ran = [layer.label for layer in recorder.never_ran]
        raise _nothing(recorder.skipped, never_ran, prepared.options.layers is not None)
    return replace(
        result,
        target=outcome.target_title,
        outcome=outcome,
        maps=tuple(reversed(maker.maps)),
        skipped=tuple(recorder.skipped),
        shown=maker.shown,
    )


def _nothing(skipped: Sequence[Skip], never_ran: Sequence[str], chosen: bool) -> UsageError:
    """The error for an image without any map; `chosen` where the user has named layers."""
    why = [f"layer {quoted(skip.layer)} ({skip.type}) {skip.reason}" for skip in skipped]
    why += [f"layer {quoted(name)} did not run" for name in never_ran]
    last = "leave --layers out for the last layer that has a map"
    return UsageError(
        f"there is no class activation map: {listed(why, _NAMED, '; ')}",
        f"{last if chosen else '--layers names another one'}; `featviz layers MODEL` lists all",
    )


class _MapMaker:
    """Takes outputs with their gradients, and makes the maps of one image."""

    def __init__(
        self,
        prepared: Prepared,
        drawer: Drawer,
        args: Sequence[Tensor],
        window: Sequence[int] | None,
        method: str,
    ) -> None:
        preprocess = prepared.model.preprocess
        self.book, self.drawer, self.method = prepared.hint_book(args), drawer, method
        self.ground, self.shown = ground_of(preprocess, args), shown_of(preprocess, args)
        self.window = window
        self.maps: list[LayerCam] = []
        """From the target to the input."""

    def take(self, site: Site, tensor: Tensor, gradient: Tensor) -> None:
        """Make the map of one call of a layer.

        Raises:
            LayoutError: it has no places, or no gradient.
        """
        hints = self.book.at(site, tensor)
        picture = self.drawer.draw(
            site, tensor, hints, self.ground, self.window, gradient=gradient
        )[""]
        output, weights = (layout.to_maps(x, hints)[""] for x in (tensor, gradient))
        values = class_maps.class_map(self.method, output, weights)[0].cpu().numpy()
        drawn = np.asarray(to_image(picture).convert("RGB"))
        limits = picture.limits.shared or (0.0, 0.0)
        self.maps.append(LayerCam(site, values[0] if len(values) == 1 else values, drawn, limits))
