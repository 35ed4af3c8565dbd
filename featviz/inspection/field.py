"""The story of `field`: images go through a model, and the gradient of each layer's
middle unit at every pixel shows how far the layer looks.

The magnitude of the gradient, averaged over images, is the effective receptive field (Luo,
Li, Urtasun and Zemel, arXiv 1701.04128). It fades from the middle outwards, and is much
smaller than the theoretical field, which has every pixel with a path to the unit."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs
from PIL import Image
from torch import Tensor

from featviz.drawing.picture import write_pixels
from featviz.errors import FeatvizError, LayoutError, UsageError
from featviz.hooks.capture import forward, leaves
from featviz.hooks.eval_mode import in_eval_mode, kept_attributes
from featviz.hooks.functions import unwatched, watch_calls
from featviz.inspection.field_picture import FieldTile, draw_field, draw_fields
from featviz.inspection.look import check_files, in_file_name, model_name
from featviz.layout import to_maps
from featviz.layout.layouts import LAYOUTS
from featviz.layout.tracing.fields import PixelBox
from featviz.layout.tracing.hints import HintBook
from featviz.models.load import LoadedModel
from featviz.options import ModelOptions, RunOptions
from featviz.options.commands import FieldOptions
from featviz.records import CaptureKey, CaptureSite, Layer, Skip
from featviz.run.prepare import (
    ModelInput,
    Prepared,
    find_images,
    prepare,
    read_input,
)
from featviz.run.visit import ImageJob, visit
from featviz.rundir.place import write_file
from featviz.text import (
    by,
    counted,
    first_line,
    layer_named,
    listed,
    of_image,
    safe_name,
)

SHARES = (0.2, 0.3, 0.5, 0.99)
"""Shares of the sum of a field; for each, the smallest square that holds it is measured.
They are the shares that Ding et al. report (RepLKNet, arXiv 2203.06717, table 8)."""


@dataclass(frozen=True)
class LayerField:
    """How far the middle unit of a layer looks."""

    model: str
    layer: str
    type: str
    call: int
    key: str
    unit: tuple[int, int]
    """Row and column of the unit in the layer's map, from 0."""
    map_size: tuple[int, int]
    """Height and width of the layer's maps."""
    values: np.ndarray = field(repr=False, compare=False)
    """float64 [H, W] of the input: the gradient of the sum of the unit's channels at each
    pixel, as absolute values, summed over the colours; the mean over images."""
    theoretical: PixelBox | None
    """What the unit can see; None if a function on the way cannot be followed, or if the
    unit sees only padding."""

    @property
    def title(self) -> str:
        """`layer4`, `relu.call1`; for the model itself its class."""
        address = CaptureKey(self.layer, "output", self.call, self.key)
        return (self.layer or self.type) + address.suffix

    @property
    def sides(self) -> dict[float, int]:
        """By share: the side in pixels of the smallest square that holds this share of all
        values."""
        return {share: square_side(self.values, share) for share in SHARES}

    @property
    def image(self) -> Image.Image:
        """The field on a logarithmic scale, with the theoretical one as a frame."""
        return Image.fromarray(draw_field(self.values, self.theoretical, "magma"))

    @property
    def tensor(self) -> Tensor:
        """The values, float64 [H, W]."""
        return torch.from_numpy(self.values.copy())

    def as_json(self) -> dict[str, Any]:
        """The field for programs, without its values."""
        row = dict(vars(self))
        del row["values"]
        row["theoretical"] = self.theoretical and self.theoretical._asdict()
        row["sides"] = {f"{100 * share:g}": side for share, side in self.sides.items()}
        return row


@dataclass(frozen=True, repr=False)
class FieldResult:
    """The effective receptive fields of layers."""

    layers: tuple[LayerField, ...]
    """Model by model, in the order in which the layers ran."""
    images: int
    """How many images the fields are the mean of; if this differs between models, the
    smallest number."""
    failures: Mapping[str, str]
    """By name of the image: why it failed."""
    skipped: tuple[Skip, ...]
    path: Path | None = None
    cmap: str = "magma"
    """The colormap of the picture."""
    weights_notes: Mapping[str, str] = field(default_factory=dict)
    """By name of the model: what the picture says of its weights. Of two models with one
    name, the last one counts."""

    @property
    def image(self) -> Image.Image:
        """The picture of all fields, and a chart of how far each layer looks."""
        tiles = []
        for layer in self.layers:
            tile = FieldTile(
                model=layer.model + self.weights_notes.get(layer.model, ""),
                layer=layer_named(layer.title),
                values=layer.values,
                theoretical=layer.theoretical,
                sides=layer.sides,
            )
            tiles.append(tile)
        return Image.fromarray(draw_fields(tiles, self.images, self.cmap))

    def __repr__(self) -> str:
        names = listed([layer.title for layer in self.layers], 3)
        return f"<FieldResult of {counted(self.images, 'image')}: {names}>"

    def as_json(self) -> dict[str, Any]:
        """The result for programs, without the values of the fields."""
        return {
            "file": None if self.path is None else str(self.path),
            "images": self.images,
            "failures": dict(self.failures),
            "layers": [layer.as_json() for layer in self.layers],
            "skipped": list(map(asdict, self.skipped)),
        }


def measure_fields(
    model: ModelOptions | LoadedModel, images: Sequence[str], options: FieldOptions
) -> FieldResult:
    """Measure the effective receptive fields of layers, and draw them in one picture.

    Args:
        images: as for `run`. An image whose input does not have the size of the first one
            fails, and is in `failures`; the others are measured.
        options: `also` names further models, which are measured on the same images;
            without `out` nothing is written.

    Raises:
        FeatvizError: no such model, layer or image; `out` exists already, and `overwrite`
            is not set; no layer has a receptive field; or all images failed.
    """
    run = RunOptions(
        layers=options.layers,
        nul_separated=options.nul_separated,
        inputs=options.inputs,
    )
    samples = find_images(images, run)
    if options.out is not None:
        check_files("field", [options.out], model, samples, options.overwrite)
    results = []
    weights_notes = {}
    for source in _with_others(model, options.also):
        prepared = prepare(source, samples, run)
        name = model_name(source)
        weights_notes[name] = prepared.model.weights_note
        results.append(_measure_model(prepared, name))
    # an image may fail in several models: the reason of the first one is kept
    failures: dict[str, str] = {}
    for result in reversed(results):
        failures.update(result.failures)
    result = FieldResult(
        layers=tuple(chain.from_iterable(result.layers for result in results)),
        images=min(result.images for result in results),
        failures=failures,
        skipped=tuple(chain.from_iterable(result.skipped for result in results)),
        path=options.out,
        cmap=options.cmap,
        weights_notes=weights_notes,
    )
    if options.out is not None:
        with write_file(options.out) as file:
            write_pixels(file, np.asarray(result.image), {"Software": "featviz field"})
    return result


def _with_others(
    model: ModelOptions | LoadedModel, also: Sequence[str]
) -> list[ModelOptions | LoadedModel]:
    """The model and those of --also. They get the options of the model, but not its
    architecture."""
    models = [model]
    for spec in also:
        base = model if isinstance(model, ModelOptions) else ModelOptions(spec)
        models.append(structs.replace(base, spec=spec, arch=None))
    return models


def picture_name(spec: str) -> str:
    """The name of the picture's file if --out gives none: `field-resnet18.png`.

    Args:
        spec: MODEL, as the user typed it.
    """
    return safe_name(f"field-{in_file_name(Path(spec).name)}.png")


def square_side(values: np.ndarray, share: float) -> int:
    """The side of the smallest square, anywhere in the field, whose values add up to a
    share of the sum of all values.

    Args:
        values: the field, [H, W], none below zero.
        share: 0..1.

    Returns:
        Pixels, from 1 to the longer side of `values`.
    """
    # A summed-area table (Crow, 1984), [H + 1, W + 1]: the sum of all values above and
    # left of each corner. Four corners give the sum in any rectangle.
    table = np.pad(values.cumsum(0).cumsum(1), ((1, 0), (1, 0)))

    def largest_sum(side: int) -> float:
        """The largest sum of values in a square of this side. A side that is longer than
        one of the field is cut to it."""
        height = min(side, values.shape[0])
        width = min(side, values.shape[1])
        sums = table[height:, width:] - table[:-height, width:]
        sums = sums - table[height:, :-width] + table[:-height, :-width]
        return float(sums.max())

    # a larger square holds no less, so the sides are searched by bisection
    sides = range(1, max(values.shape))
    return 1 + bisect_left(sides, share * table[-1, -1], key=largest_sum)


# Measuring


@dataclass
class _MiddleUnit:
    """The unit in the middle of a layer's maps, and the sum of its gradients."""

    unit: tuple[int, int]
    map_size: tuple[int, int]
    values: np.ndarray
    """float64 [H, W] of the input: the sum over the images so far."""


class _Measure:
    """Adds up, image by image, the gradients of the middle units of layers."""

    def __init__(self, prepared: Prepared) -> None:
        """Begin without a sum."""
        self.module = prepared.model.module
        self.device = prepared.model.device
        self.layers = prepared.layers
        self.book: HintBook | None = None
        """Hints for inputs of the first image's shape, with the theoretical fields."""
        self.units: dict[CaptureSite, _MiddleUnit] = {}
        self.reasons: dict[CaptureSite, str] = {}
        """Why a tensor has no field."""
        self.numbers: dict[CaptureSite, Tensor] = {}
        """The sum of the channels of each middle unit, in the current pass."""
        self.calls: Counter[str] = Counter()
        """By name of the layer: how often it was called in the current pass."""

    def show(
        self,
        functions: AbstractContextManager[Any],
        jobs: Sequence[ImageJob[ModelInput, None]],
    ) -> None:
        """Run the model on an image, and go back from each middle unit.

        Args:
            functions: entered around the pass, so that functions are hooked, too.
            jobs: exactly one, whose image was read.

        Raises:
            UsageError: the input cannot be measured; see `_follow`.
            ForwardError: the model fails.
        """
        image = jobs[0].input
        assert image is not None, "images that cannot be read are not shown"
        args = [arg.to(self.device) for arg in image.args]
        self._follow(args)
        inputs = [arg.clone().requires_grad_(arg.is_floating_point()) for arg in args]
        self.numbers = {}
        self.calls.clear()
        with kept_attributes(self.module):
            with functions:
                # Copies, since autograd allows no in-place change of a leaf, which a model
                # makes whose first layer is an in-place ReLU.
                forward(self.module, [arg.clone() for arg in inputs])
            for site, number in self.numbers.items():
                self._go_back(site, number, inputs[0])

    def _go_back(self, site: CaptureSite, number: Tensor, image: Tensor) -> None:
        """Add the gradient of a middle unit's number at the image to the unit's sum. If
        there is no usable gradient, keep the reason.

        Args:
            number: the sum of the unit's channels.
            image: the leaf of the graph that the model's input was copied from.
        """
        try:
            # The graph is kept for the other units. If a unit does not depend on the image,
            # its gradient is None.
            (gradient,) = torch.autograd.grad(
                number, [image], retain_graph=True, allow_unused=True
            )
        # a value was changed in place, or an operator has no derivative
        except RuntimeError as error:
            self.reasons[site] = f"has no gradient: {first_line(error)}"
            return
        if gradient is not None and not gradient.isfinite().all():
            self.reasons[site] = "has a gradient that is NaN or infinite"
        elif gradient is not None:
            sizes = gradient.abs().double().flatten(0, -3).sum(0)
            self.units[site].values += sizes.cpu().numpy()

    def _follow(self, args: Sequence[Tensor]) -> None:
        """For the first image, follow its pixels through a pass on zeros. For another one,
        check that its input has the size of the first.

        Args:
            args: the model's arguments, of which the first is the image.

        Raises:
            UsageError: the input has no height and width, or another shape than that of the
                first image.
        """
        shape = tuple(args[0].shape)
        if len(shape) < 4 or shape[-2:] == (1, 1):
            raise UsageError(
                f"the model's input {list(shape)} has no height and width",
                "a receptive field is one of a model that takes images",
            )
        # zeros: the theoretical field follows from the architecture, whatever the image
        if self.book is None:
            book = HintBook(self.module, shape)
            with torch.no_grad(), book.traced(self.module, self.layers, fields=True):
                forward(self.module, [torch.zeros_like(arg) for arg in args])
            self.book = book
        # gradients of different sizes have no mean
        elif shape != self.book.input_shape:
            size = by(shape[-2:][::-1])
            first = by(self.book.input_shape[-2:][::-1])
            raise UsageError(
                f"its input is {size}, and that of the first image {first}",
                "--size or --crop makes them alike",
            )

    def leave(self, layer: Layer, args: Any, kwargs: Any, output: Any) -> None:
        """The hook of a layer. It takes the number of the middle unit at once, since a later
        operation may change the output in place."""
        # the pass on zeros, which makes the book
        if self.book is None:
            return
        call = self.calls[layer.name]
        self.calls[layer.name] += 1
        with unwatched():
            for key, value in leaves(output):
                if isinstance(value, Tensor):
                    site = CaptureSite(layer, "output", call, key)
                    self._take(site, value, self.book)

    def _take(self, site: CaptureSite, tensor: Tensor, book: HintBook) -> None:
        """Keep the sum of the channels of a tensor's middle unit, or the reason why the
        tensor has no field.

        Args:
            tensor: an output of a layer, attached to the graph of autograd.
        """
        try:
            maps = to_maps(tensor, book.of_tensor(site, tensor))[""]
        except LayoutError as error:
            self.reasons[site] = error.message
            return
        height, width = maps.data.shape[2:]
        if not LAYOUTS[maps.layout].aligned or height * width == 1:
            self.reasons[site] = "has no places of the image"
        elif not tensor.requires_grad:
            self.reasons[site] = "has no gradient: it is cut off from the input"
        else:
            unit = (height // 2, width // 2)
            self.numbers[site] = maps.data[..., unit[0], unit[1]].sum()
            nothing = np.zeros(book.input_shape[-2:])
            self.units.setdefault(site, _MiddleUnit(unit, (height, width), nothing))


def _show_all(prepared: Prepared, measure: _Measure) -> dict[str, FeatvizError]:
    """Show all images to the model, and return the errors of those that failed, by name of
    the image."""
    module = prepared.model.module
    names = {layer.name for layer in prepared.layers if layer.is_function}
    errors: dict[str, FeatvizError] = {}
    read = partial(
        read_input,
        preprocess=prepared.model.preprocess,
        inputs=prepared.options.inputs,
    )
    with (
        in_eval_mode(module, gradients=True),
        watch_calls(
            module,
            measure.leave,
            layers=[layer for layer in prepared.layers if not layer.is_function],
            # None if no function is selected, since watching functions slows down every call
            functions=(lambda layer: layer.name in names) if names else None,
        ) as hooked_functions,
    ):
        show = partial(measure.show, hooked_functions)
        for job in visit(prepared.samples, read, show):
            if job.error is not None:
                errors[job.sample.name] = job.error
    return errors


def _measure_model(prepared: Prepared, model_name: str) -> FieldResult:
    """Measure the fields of one model's layers.

    Args:
        model_name: the name of the model in the picture and in messages.

    Raises:
        FeatvizError: all images failed; the message is that of the first one.
        UsageError: no layer has a field.
    """
    measure = _Measure(prepared)
    errors = _show_all(prepared, measure)
    seen = len(prepared.samples) - len(errors)
    if not seen:
        image, error = next(iter(errors.items()))
        raise FeatvizError(of_image(image, error.message), error.hint)
    fields = []
    for site, unit in measure.units.items():
        if site in measure.reasons:
            continue
        # the gradient is zero everywhere if a ReLU gives 0 for this unit in all images
        if unit.values.any():
            mean = unit.values / seen
            fields.append(_field_at(measure, site, model_name, mean))
        else:
            measure.reasons[site] = (
                "has no gradient in its middle: it is zero there in all images, or does"
                " not depend on the input"
            )
    skipped = [Skip.of(site, reason) for site, reason in measure.reasons.items()]
    if not fields:
        reasons = [f"{layer_named(skip.label)} {skip.reason}" for skip in skipped]
        reason = listed(reasons, 3, "; ") or "none gives a tensor"
        raise UsageError(
            f"no layer of {model_name} has a receptive field: {reason}",
            "--layers names others; `featviz layers MODEL` lists them",
        )
    failures = {image: error.message for image, error in errors.items()}
    return FieldResult(tuple(fields), seen, failures, tuple(skipped))


def _field_at(
    measure: _Measure, site: CaptureSite, model: str, values: np.ndarray
) -> LayerField:
    """The result for one tensor.

    Args:
        site: the tensor whose middle unit was measured.
        model: the model's name.
        values: `LayerField.values`.
    """
    assert measure.book is not None, "a layer with a field has run"
    middle = measure.units[site]
    theoretical = measure.book.receptive_field(site)
    return LayerField(
        model=model,
        layer=site.layer.name,
        type=site.layer.type,
        call=site.call,
        key=site.key,
        unit=middle.unit,
        map_size=middle.map_size,
        values=values,
        theoretical=None if theoretical is None else theoretical.box(*middle.unit),
    )
