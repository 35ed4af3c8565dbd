"""The story of `cam`: images go through a model one by one, and class activation maps over each
show where the evidence for a class lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs
from PIL import Image
from torch import Tensor

from featviz import layout
from featviz.drawing import colormap, normalize
from featviz.drawing.drawer import class_map, draw_maps
from featviz.drawing.page import write_figure
from featviz.drawing.picture import lay_over, to_image
from featviz.drawing.sheet import Tile
from featviz.drawing.values import to_pixels
from featviz.errors import FeatvizError, UsageError
from featviz.gradients import passes
from featviz.gradients.targets import PAIRED
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.layers import list_layers
from featviz.inspection.look import check_files
from featviz.layout import Maps
from featviz.layout.layouts import LAYOUTS
from featviz.layout.tracing.hints import HintBook
from featviz.models.load import LoadedModel
from featviz.models.requirements import require_matplotlib
from featviz.options import DrawOptions, ModelOptions, PassOptions, RunOptions
from featviz.options.commands import CamOptions
from featviz.records import (
    KINDS,
    REDUCTIONS,
    SUFFIXES,
    Bytes,
    CaptureSite,
    ClassScore,
    Floats,
    Layer,
    Outcome,
    Sample,
    Skip,
)
from featviz.run.prepare import ModelInput, Prepared, Show, find_images, prepare, read_input
from featviz.run.stages import ADDS_NOTHING
from featviz.run.visit import ImageJob, visit
from featviz.rundir.place import write_file
from featviz.text import listed, printable, quoted, safe_name


@dataclass(frozen=True)
class LayerCam:
    """The class activation map of one call of a layer."""

    site: CaptureSite
    values: Floats = field(repr=False, compare=False)
    picture: Bytes = field(repr=False, compare=False)
    limits: tuple[float, float]
    """The values that are drawn darkest and brightest."""

    @property
    def name(self) -> str:
        """`layer4`, `relu call 1`."""
        call = f"call {self.site.call}" if self.site.call else ""
        return " ".join(part for part in (self.site.layer.label, call, self.site.key) if part)

    @property
    def layer(self) -> str:
        """Qualified name of the layer; empty for the model itself."""
        return self.site.layer.name

    @property
    def image(self) -> Image.Image:
        """The map over what the model saw: RGB, in the size of the input."""
        return Image.fromarray(self.picture)

    @property
    def tensor(self) -> Tensor:
        """The map's values, float32 [H, W] in the resolution of the layer; [T, H, W] of a clip."""
        return torch.from_numpy(self.values.copy())


@dataclass(frozen=True)
class ImageCam:
    """The class activation maps of one image, or why there are none."""

    image: str
    method: str
    target: str = ""
    """What the maps are evidence for: `tabby`, `class 281`, or the target as it was given."""
    outcome: Outcome = field(default_factory=Outcome)
    maps: tuple[LayerCam, ...] = ()
    skipped: tuple[Skip, ...] = ()
    path: Path | None = None
    shown: Bytes | None = field(default=None, repr=False, compare=False)
    """What the model saw, uint8 [H, W, C]."""
    error: FeatvizError | None = None

    @property
    def prediction(self) -> tuple[ClassScore, ...]:
        """The likeliest classes, where the model is a classifier."""
        return self.outcome.prediction

    @property
    def words(self) -> str:
        """`cat.jpg: tabby 43.1 %; Grad-CAM for tabby`."""
        guess = f": {self.prediction[0].text}" if self.prediction else ""
        return f"{self.image}{guess}; {REDUCTIONS[self.method].title} for {self.target}"

    def as_json(self) -> dict[str, Any]:
        """For programs: all but the pixels."""
        if self.error is not None:
            return {"image": self.image, "error": self.error.message}
        return {
            "image": self.image,
            "file": None if self.path is None else str(self.path),
            "prediction": [asdict(guess) for guess in self.prediction],
            "method": self.method,
            "target": {"of": self.target, "value": self.outcome.target},
            "maps": [
                {
                    "layer": one.layer,
                    "type": one.site.layer.type,
                    "call": one.site.call,
                    "key": one.site.key,
                    "shape": one.values.shape,
                    "range": one.limits,
                }
                for one in self.maps
            ],
            "skipped": [asdict(skip) for skip in self.skipped],
        }


def cam(
    model: ModelOptions | LoadedModel, images: Sequence[str], options: CamOptions
) -> Iterator[ImageCam]:
    """Draw class activation maps over images, and yield each image when its picture is written.

    What goes wrong with one image is in its result.

    Raises:
        FeatvizError: a bad option, no such model, layer or image, no layer with places, or a file
            cannot be written; nothing was written before.
    """
    out = options.out
    run = RunOptions(
        layers=options.layers,
        nul_separated=options.nul_separated,
        draw=DrawOptions(
            reduce=options.method,
            scale=1,
            overlay=options.overlay,
            cmap=options.cmap,
            tensor_layout=options.tensor_layout,
        ),
        inputs=options.inputs,
        passes=PassOptions(PAIRED, options.target),
    )
    found = find_images(images, run)
    if out is not None:
        paths = _files(found, out).values()
        if out.exists() and not out.is_dir() and out not in paths:
            message = f"--out {quoted(str(out))} is no folder"
            raise UsageError(message, "name a folder, or a .png file")
        check_files("cam", paths, model, found, options.overwrite)
    prepared = prepare(model, found, run)
    files = {} if out is None else _files(prepared.samples, out)
    if len(set(files.values())) < len(files):
        raise UsageError(
            f"--out {quoted(str(out))} would hold several images in one picture",
            "name a folder with --out, or one of the images",
        )
    if options.layers is None:
        prepared = replace(prepared, layers=[last_map(prepared)])
    require_matplotlib()
    cmap = colormap.resolved(options.cmap, over=True, reduce=options.method)
    read = partial(read_input, preprocess=prepared.model.preprocess, inputs=options.inputs)
    with prepared.watched() as show:
        explain = partial(_explain, prepared, show, cmap)
        for seen in visit(prepared.samples, read, explain):
            result, place = seen.result, files.get(seen.sample.name)
            if result is None:
                result = ImageCam(seen.sample.name, options.method, error=seen.error)
            elif place is not None:
                assert result.shown is not None
                panels = [
                    Tile(printable(f"{one.name} ({one.site.layer.type})"), one.picture, one.limits)
                    for one in result.maps
                ]
                title = f"{result.words} at {', '.join(one.name for one in result.maps)}"
                with write_file(place) as file:
                    text = {"Software": "featviz cam", "Title": title}
                    write_figure(file, result.words, result.shown, panels, cmap, text)
                result = replace(result, path=place)
            yield result


def _files(samples: Sequence[Sample], out: Path) -> dict[str, Path]:
    """The picture's file of each image: its name without the ending, where no other has it."""
    if out.suffix.lower() in (".jpeg", *SUFFIXES) and not out.is_dir():
        return {sample.name: out for sample in samples}
    flat = [sample.name.replace("/", "__") for sample in samples]
    stems = Counter(Path(name).stem for name in flat)
    names = [name if stems[Path(name).stem] > 1 else Path(name).stem for name in flat]
    files = [out / safe_name(f"cam-{name}.png") for name in names]
    return {sample.name: file for sample, file in zip(samples, files, strict=True)}


def last_map(prepared: Prepared) -> Layer:
    """The last layer whose output has places of the image on which the target depends.

    It is found by shapes and gradients of a pass on zeros, whose plan captures outputs and
    gradients. Behind the last attention of a vision transformer that reads its class token, the
    target depends on no other token, so its last layer is one before that attention. Poolings and
    the like add nothing to the layer before them; a layer inside an attention, or one that runs
    several times, is taken only where there is no other."""
    model, draw = prepared.model, prepared.options.draw
    book = HintBook(model.module, prepared.blank[0].shape, draw.tensor_layout)
    order: list[Layer] = []  # of the outputs that are maps with several places
    reached: set[Layer] = set()  # those whose gradient is not zero at every place

    def take(site: CaptureSite, tensor: Tensor) -> None:
        hints = book.of_tensor(site, tensor)
        size = layout.map_size(list(tensor.shape), hints)
        if size is None or not LAYOUTS[size[0]].aligned or size[1:] == (1, 1):
            return
        if not KINDS[site.kind].backward:
            order.append(site.layer)
        elif layout.to_maps(tensor, hints)[""].data.any():
            reached.add(site.layer)

    layers = [
        layer
        for layer in list_layers(model.module)
        if layer.index and not ADDS_NOTHING.intersection(layer.classes)
    ]
    with (
        in_eval_mode(model.module, gradients=True),
        passes.watched(model, prepared.plan, layers) as hooks,
    ):
        hooks.show(prepared.blank, book, take)
    plain = [layer for layer in order if not book.of_layer(layer).in_attention]
    choices = [layer for layer in plain if order.count(layer) == 1], plain, order
    depended_on = [[layer for layer in some if layer in reached] for some in choices]
    for some in (*depended_on, *choices):
        if some:
            return some[-1]
    raise UsageError(
        "no layer gives maps of the image, which a class activation map lies on",
        "--layers names one, and --tensor-layout says how to read it; "
        "`featviz layers MODEL` lists them, with shapes",
    )


def _explain(
    prepared: Prepared, show: Show, cmap: str, images: Sequence[ImageJob[ModelInput, ImageCam]]
) -> ImageCam:
    """Show one image to the model, go back from the target, and draw each layer's map."""
    sample, image = images[0].sample, images[0].input
    assert image is not None, "images that cannot be read are not shown"
    method = str(prepared.options.draw.reduce)
    scale = normalize.parse_scale("auto", reduce=method)
    # of the one channel that a class activation map has
    draw = structs.replace(prepared.options.draw, cmap=cmap, reduce="max")
    maps: list[LayerCam] = []
    hints, background = prepared.hints(image.args), image.background()
    shown = to_pixels(image.preprocess.shown(image.args)[0])

    def take(site: CaptureSite, tensor: Tensor, gradient: Tensor) -> None:
        """The sink of the hooks; LayoutError where there are no places, or no gradient."""
        known = hints.of_tensor(site, tensor)
        output, weights = (layout.to_maps(x, known)[""] for x in (tensor, gradient))
        evidence = class_map(method, output, weights)
        picture = draw_maps(Maps(output.layout, evidence), draw, scale)
        laid = to_image(lay_over(picture, background, draw, image.window))
        values = evidence[0].cpu().numpy()
        values = values[0] if len(values) == 1 else values
        limits = picture.limits.shared or (0.0, 0.0)
        maps.append(LayerCam(site, values, np.asarray(laid.convert("RGB")), limits))

    outcome, recorder = show(image.args, hints, take)
    if not maps:
        why = [f"layer {quoted(s.layer)} ({s.type}) {s.reason}" for s in recorder.skipped]
        why += [f"layer {quoted(layer.label)} did not run" for layer in recorder.never_ran]
        hint = "--layers names another one"
        if prepared.options.layers is not None:  # the user has named some
            hint = "leave --layers out for the last layer that has a map"
        raise UsageError(
            f"there is no class activation map: {listed(why, 3, '; ')}",
            f"{hint}; `featviz layers MODEL` lists all",
        )
    return ImageCam(
        sample.name,
        method,
        target=outcome.target_title,
        outcome=outcome,
        maps=tuple(reversed(maps)),
        skipped=tuple(recorder.skipped),
        shown=shown,
    )
