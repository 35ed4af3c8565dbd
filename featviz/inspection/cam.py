"""The story of `cam`: images go through a model one by one, and class activation maps
over each show where the evidence for a class lies."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import structs
from PIL import Image
from torch import Tensor
from torch.nn import functional

from featviz import layout
from featviz.drawing import colormap, normalize, vector
from featviz.drawing.channels import choose_channels, warn_of_missing
from featviz.drawing.drawer import class_map, draw_maps
from featviz.drawing.normalize import Scale
from featviz.drawing.outlines import with_boxes, with_outline
from featviz.drawing.page import write_figure
from featviz.drawing.picture import lay_over, to_image
from featviz.drawing.sheet import Tile
from featviz.drawing.values import MEAN, inner_deviations, statistics, to_pixels
from featviz.errors import FeatvizError, UsageError
from featviz.gradients import targets
from featviz.gradients.targets import PAIRED
from featviz.inspection.cam_layers import default_layers
from featviz.inspection.look import check_files
from featviz.layout import Maps
from featviz.models.load import LoadedModel
from featviz.models.requirements import require_matplotlib
from featviz.options import DrawOptions, ModelOptions, PassOptions, RunOptions
from featviz.options.commands import CamOptions
from featviz.records import (
    ATTENTION_MAPS,
    REDUCTIONS,
    SIGNED,
    SUFFIXES,
    Bytes,
    CaptureSite,
    ClassScore,
    Detection,
    Floats,
    Integers,
    Outcome,
    Sample,
    Skip,
)
from featviz.run import workers
from featviz.run.prepare import (
    ModelInput,
    Prepared,
    Show,
    find_images,
    prepare,
    read_input,
)
from featviz.run.run import stop_requests
from featviz.run.visit import ImageJob, visit
from featviz.rundir.place import write_file
from featviz.text import gaps, layer_named, percent, printable, quoted, safe_name

_NOTHING = 1e-9
"""If the largest magnitude of a map is below this, the target does not depend on the layer."""


@dataclass(frozen=True)
class LayerCam:
    """The class activation map of one call of a layer."""

    site: CaptureSite
    values: Floats = field(repr=False, compare=False)
    """float32 [H, W] in the resolution of the layer; [T, H, W] for a clip."""
    picture: Bytes = field(repr=False, compare=False)
    """The map over what the model saw, uint8 [H, W, 3] in the size of the input."""
    limits: tuple[float, float]
    """The values that are drawn darkest and brightest."""
    channels: int
    """How many channels the layer's output has; 0 for the maximum of several layers."""
    title: str = ""
    """The name of a map that joins several layers; empty for the map of one layer."""

    @property
    def name(self) -> str:
        """`layer4`, `relu.call1`."""
        return self.title or self.site.layer.label + self.site.suffix

    @property
    def caption(self) -> str:
        """`layer4 (Sequential)`; for a layer whose name is a number `layer 7 (ReLU)`. The
        caption also says if a map is practically zero, and its colours show noise."""
        caption = f"{layer_named(self.name)} ({self.site.layer.type})"
        peak = np.abs(self.values).max()
        if peak < _NOTHING:
            caption += ": practically zero" if peak else ": zero everywhere"
        return caption

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
        """The map's values, float32 [H, W] in the resolution of the layer; [T, H, W] for
        a clip."""
        return torch.from_numpy(self.values.copy())


@dataclass(frozen=True)
class ImageCam:
    """The class activation maps of one image, or why there are none."""

    image: str
    method: str
    target: str = ""
    """What the maps are evidence for: `tabby`, `class 281`, or the target as it was
    given."""
    target_probability: float | None = None
    """The probability of the target's class, 0..1; None if the target is no class."""
    outcome: Outcome = field(default_factory=Outcome)
    maps: tuple[LayerCam, ...] = ()
    maximum: LayerCam | None = None
    """The maximum over the levels of a detector's head, in the size of the input."""
    detections: tuple[Detection, ...] = ()
    """The boxes of a detector in pixels of the file's image; `box:N` has index N."""
    skipped: tuple[Skip, ...] = ()
    path: Path | None = None
    shown: Bytes | None = field(default=None, repr=False, compare=False)
    """What the model saw, uint8 [H, W, C]."""
    shown_title: str = "input"
    """The title above `shown`: `input`, and what is marked in it."""
    weights_note: str = ""
    """` (random weights)` if they are random; else empty."""
    error: FeatvizError | None = None

    @property
    def prediction(self) -> tuple[ClassScore, ...]:
        """The likeliest classes; empty if the model is no classifier."""
        return self.outcome.prediction

    @property
    def title(self) -> str:
        """`cat.jpg: tabby (43.1 %); Grad-CAM for lynx (2.5 %)`."""
        title = self.image
        target = self.target
        if self.prediction:
            likeliest = self.prediction[0]
            title += f": {likeliest.title} ({percent(likeliest.probability)})"
        if self.target_probability is not None and self.prediction[0].title != target:
            target += f" ({percent(self.target_probability)})"
        behind = f" for {target}" if target else ""
        return f"{title}; {REDUCTIONS[self.method].title}{self.weights_note}{behind}"

    def as_json(self) -> dict[str, Any]:
        """For programs: all but the pixels."""
        if self.error is not None:
            return {"image": self.image, "error": self.error.message}
        maps = []
        for layer_map in self.maps:
            site = layer_map.site
            maps.append(
                {
                    "layer": site.layer.name,
                    "type": site.layer.type,
                    "call": site.call,
                    "key": site.key,
                    "shape": layer_map.values.shape,
                    "range": layer_map.limits,
                }
            )
        return {
            "image": self.image,
            "file": None if self.path is None else str(self.path),
            "prediction": list(map(asdict, self.prediction)),
            "detections": list(map(asdict, self.detections)),
            "method": self.method,
            "target": {
                "of": self.target,
                "value": self.outcome.target,
                "probability": self.target_probability,
            },
            "maps": maps,
            "skipped": list(map(asdict, self.skipped)),
        }


def cam(
    model: ModelOptions | LoadedModel, images: Sequence[str], options: CamOptions
) -> Iterator[ImageCam]:
    """Draw class activation maps over images, and yield the result of each image when its
    picture is written. If an image fails, its result has the error.

    Args:
        images: as for `run`.
        options: without `out` nothing is written, and results have no path.

    Raises:
        FeatvizError: before anything is written: a bad option, no such model, layer or
            image, or no layer with places. Later: a picture cannot be written.
    """
    run = _run_options(options)
    is_attention = options.method in ATTENTION_MAPS
    chooses_layers = options.layers is None and not is_attention
    # Files are checked twice. First with the images that were named, before the model is
    # loaded, so that a mistake costs no time. Then with the samples that the model takes: a
    # clip is one sample of several images.
    samples = find_images(images, run)
    if options.out is not None:
        _check_out(options, model, samples, options.out)
    if chooses_layers:
        # `default_layers` chooses among all layers, so the stages need not be found
        prepared = prepare(model, samples, structs.replace(run, layers="*"))
    else:
        prepared = prepare(model, samples, run)
    files = {}
    if options.out is not None:
        files = picture_files(prepared.samples, options.out, options.target)
        if len(set(files.values())) < len(files):
            raise UsageError(
                f"--out {quoted(str(options.out))} would hold several images in one"
                " picture",
                "name a folder with --out, or one of the images",
            )
    if chooses_layers:
        prepared = replace(prepared, layers=default_layers(prepared), options=run)
    elif options.layers is None:
        # the last block has seen all attention
        prepared = replace(prepared, layers=prepared.layers[-1:])
    require_matplotlib()
    cmap = colormap.decide_cmap(options.cmap, over=True, reduce=options.method)
    read = partial(
        read_input, preprocess=prepared.model.preprocess, inputs=options.inputs
    )
    with prepared.watched() as show:
        explain = partial(_explain, prepared, show, cmap, options.channels)

        def explained(samples: Sequence[Sample]) -> Iterator[ImageCam]:
            """Yield the result of each image, after its picture was written if `files` has
            a path for it."""
            for job in visit(samples, read, explain):
                result = job.result
                if result is None:
                    name = job.sample.name
                    yield ImageCam(name, options.method, error=job.error)
                elif job.sample.name in files:
                    yield _write_picture(result, files[job.sample.name], cmap)
                else:
                    yield result

        yield from _warn_at_end(
            _share_among_workers(prepared, options, explained), options.channels
        )


def _warn_at_end(
    results: Iterable[ImageCam], channels: str | None
) -> Iterator[ImageCam]:
    """Yield the results, and then warn of chosen channels that no layer has.

    Args:
        channels: the text of --channels; None if it was not given.
    """
    present: dict[str, range] = {}
    for result in results:
        present |= {row.name: range(row.channels) for row in result.maps}
        yield result
    warn_of_missing(channels, present)


def _share_among_workers(
    prepared: Prepared,
    options: CamOptions,
    explained: Callable[[Sequence[Sample]], Iterator[ImageCam]],
) -> Iterator[ImageCam]:
    """Explain the images in this process, or divide them among worker processes.

    Args:
        explained: makes the result of each sample, while the model is watched.

    Raises:
        KeyboardInterrupt: the user has asked to stop, and the workers have finished their
            images.
    """
    samples = prepared.samples
    count = workers.worker_count(
        prepared.model, samples, options.jobs, prepared.plan.backward
    )
    if count == 1:
        yield from explained(samples)
        return

    def work(numbers: Iterator[int]) -> Iterator[ImageCam]:
        for number in numbers:
            yield from explained([samples[number]])

    def lost(number: int, error: workers.WorkerDiedError) -> ImageCam:
        return ImageCam(samples[number].name, options.method, error=error)

    # Workers finish their image before they stop: a killed one would leave half a file.
    with stop_requests() as stop:
        first = explained(samples[:1])
        yield from workers.side_by_side(first, len(samples), work, count, stop, lost)
    if stop.is_set():
        raise KeyboardInterrupt


def _run_options(options: CamOptions) -> RunOptions:
    """The options of a run that captures the outputs and gradients of which the maps are
    made."""
    is_attention = options.method in ATTENTION_MAPS
    return RunOptions(
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
        passes=PassOptions(("output",) if is_attention else PAIRED, options.target),
    )


def _check_out(
    options: CamOptions,
    model: ModelOptions | LoadedModel,
    samples: Sequence[Sample],
    out: Path,
) -> None:
    """Refuse to write a picture over something else: a file with another ending than .png, .pdf
    and .svg, the model, an image, or a picture that `cam` did not make.

    Args:
        samples: the images as they were named, before clips are made of them.
        out: as for `picture_files`.

    Raises:
        UsageError: such a file is in the way.
    """
    files = picture_files(samples, out, options.target)
    if out.exists() and not out.is_dir() and out not in files.values():
        message = f"--out {quoted(str(out))} is no folder"
        raise UsageError(message, "name a folder, or a .png, .pdf or .svg file")
    formats = ("png", *vector.FORMATS)
    check_files("cam", files.values(), model, samples, options.overwrite, formats)


def picture_files(
    samples: Sequence[Sample], out: Path, target: str | None
) -> dict[str, Path]:
    """The path of each image's picture, by the image's name.

    The name of the file has the name of the image, without its ending if no other image has
    that name. It also has the target, so that maps for several targets can lie in one
    folder: `cam-cat-class3.png`.

    Args:
        out: a folder; or a picture file, which is then the path for all images.
        target: as it was given; None adds nothing to the name.
    """
    endings = (".jpeg", ".eps", ".pdf", ".svg", *SUFFIXES)
    if out.suffix.lower() in endings and not out.is_dir():
        return {sample.name: out for sample in samples}
    behind = ""
    if target is not None:
        behind = "-" + re.sub(r"^(\w+):(?=\d+$)", r"\1", target).replace(":", "-")
    flat_names = {sample.name: sample.name.replace("/", "__") for sample in samples}
    # `a/cat.jpg` and `a/cat.png` are two images: both keep their endings
    stems = Counter(Path(name).stem for name in flat_names.values())
    files = {}
    for name, flat_name in flat_names.items():
        stem = Path(flat_name).stem
        if stems[stem] > 1:
            stem = flat_name
        files[name] = out / safe_name(f"cam-{stem}{behind}.png")
    return files


def _write_picture(result: ImageCam, path: Path, cmap: str) -> ImageCam:
    """Write the picture of an image, and return the result with the path of the picture.

    Args:
        result: the result of an image that did not fail.
        cmap: the colormap in which the maps were drawn, for the colour bars.
    """
    assert result.shown is not None, "only images that failed have none"
    method = REDUCTIONS[result.method]
    note = method.title if method.attends else f"evidence ({method.title})"
    tiles = []
    for layer_map in result.maps:
        title = printable(layer_map.caption)
        # a map of zeros has no scale
        limits = layer_map.limits if layer_map.values.any() else None
        tiles.append(Tile(title, layer_map.picture, limits, note))
    if result.maximum is not None:
        maximum = result.maximum
        tiles.insert(0, Tile(maximum.name, maximum.picture, maximum.limits, note))
    title = f"{result.title} at {', '.join(row.caption for row in result.maps)}"
    text = {"Software": "featviz cam", "Title": title}
    with write_file(path) as file:
        height, width = result.shown.shape[:2]
        seen = Tile(result.shown_title, result.shown)
        format = path.suffix.lower()[1:]
        aspect = height / width
        write_figure(file, result.title, seen, tiles, cmap, text, aspect, format)
    return replace(result, path=path)


class _Evidence(NamedTuple):
    """The class activation map of a layer before it is drawn."""

    site: CaptureSite
    maps: Maps
    """One channel, [1, S, H, W], of S slices."""
    channels: int = 0
    """How many channels the layer's output has."""


class _Explanation(NamedTuple):
    """What one pass forward and back says of an image."""

    evidence: Sequence[_Evidence]
    """One for each layer, in the order in which they ran."""
    outcome: Outcome
    skipped: Sequence[Skip]


def _explain(
    prepared: Prepared,
    show: Show,
    cmap: str,
    channels: str | None,
    images: Sequence[ImageJob[ModelInput, ImageCam]],
) -> ImageCam:
    """Show one image to the model, go back from the target, and draw each layer's map.

    Args:
        show: runs the model, with its hooks in place.
        cmap: the name of a colormap, not `auto`.
        channels: the text of --channels: only these channels make the maps; None for all.
        images: exactly one, which was read.

    Raises:
        UsageError: there is no map, or no such target in this image.
    """
    image = images[0].input
    assert image is not None, "images that cannot be read are not shown"
    method = str(prepared.options.draw.reduce)
    # before the pass, in which the model may change its input in place
    shown = to_pixels(image.preprocess.shown(image.args)[0])
    explanation = _make_evidence(prepared, show, image, channels)
    outcome = explanation.outcome
    maps, maximum = _draw_evidence(prepared, explanation, image, cmap)
    return ImageCam(
        image=images[0].sample.name,
        method=method,
        target=outcome.target_title,
        target_probability=target_probability(prepared.options.passes.target, outcome),
        # Masks of regions are drawn by now. They would only make the result larger, which a
        # worker process sends to this one.
        outcome=replace(outcome, regions=None, focus=None),
        maps=tuple(maps),
        maximum=maximum,
        detections=image.in_file(outcome.detections),
        skipped=tuple(explanation.skipped),
        shown=_with_marks(shown, outcome.focus),
        shown_title=_shown_title(outcome),
        weights_note=prepared.model.weights_note,
    )


def _draw_evidence(
    prepared: Prepared, explanation: _Explanation, image: ModelInput, cmap: str
) -> tuple[list[LayerCam], LayerCam | None]:
    """Draw the map of each layer over the image.

    Args:
        explanation: has at least one map.
        cmap: as in `_explain`.

    Returns:
        The maps, and the maximum over the levels of a detector's head. The maximum is None
        if the target is no box, if there is only one level, or if the user named layers.
    """
    evidence, outcome, _ = explanation
    method = str(prepared.options.draw.reduce)
    # With `max` the one channel of a class activation map is drawn as one large tile,
    # without marks.
    options = structs.replace(prepared.options.draw, cmap=cmap, reduce="max")
    drawn = partial(_draw_over_input, image=image, options=options, outcome=outcome)
    scale = normalize.parse_scale("auto", reduce=method)
    has_levels = prepared.options.layers is None and len(evidence) > 1
    maximum = None
    if has_levels and isinstance(outcome.focus, Detection):
        # A box is found at one level of the head. On the common scale the maps of the other
        # levels are dark.
        scale = _common_scale(evidence, signed=method in SIGNED)
        maximum = replace(
            drawn(_maximum_of_levels(evidence, image.args[0].shape[-2:]), scale=scale),
            title=f"maximum of {len(evidence)} levels",
        )
    return [drawn(level, scale=scale) for level in evidence], maximum


def _make_evidence(
    prepared: Prepared, show: Show, image: ModelInput, channels: str | None
) -> _Explanation:
    """Show an image to the model, and make a map of each layer's output and gradient.

    Args:
        channels: the text of --channels: only these channels make the maps; None for all.

    Raises:
        UsageError: no layer gives a map; the message has the reasons.
    """
    method = str(prepared.options.draw.reduce)
    hints = prepared.hints(image.args)
    evidence: list[_Evidence] = []

    def take(site: CaptureSite, tensor: Tensor, gradient: Tensor) -> None:
        """The sink of the hooks: make the map of a layer's output and its gradient.

        Raises:
            LayoutError: the output has no places or none of the channels, or the gradient
                is zero.
        """
        at_site = hints.of_tensor(site, tensor)
        output = layout.to_maps(tensor, at_site)[""]
        slopes = layout.to_maps(gradient, at_site)[""]
        count = len(output.data)
        if channels is not None:
            means = statistics(output.data)[:, MEAN]
            # without the border that padding makes, which may vary more than the map
            deviations = inner_deviations(output.data, at_site.border)
            chosen = choose_channels(channels, range(count), means, deviations)
            output = Maps(output.layout, output.data[chosen])
            slopes = Maps(slopes.layout, slopes.data[chosen])
        values = class_map(method, output, slopes)
        evidence.append(_Evidence(site, Maps(output.layout, values), count))

    outcome, recorder = show(image.args, hints, take)
    # Gradients come from the last layer to the first. Attention maps need no gradients,
    # and come in the order of the layers.
    if method not in ATTENTION_MAPS:
        evidence.reverse()
    if evidence:
        return _Explanation(evidence, outcome, recorder.skipped)
    # one reason for each layer, the last one of its outputs and gradients
    skipped = {quoted(skip.label): skip.reason for skip in recorder.skipped}
    never_ran = [quoted(layer.label) for layer in recorder.never_ran]
    hint = "--layers names another one; `featviz layers MODEL` lists all"
    if method in ATTENTION_MAPS:
        hint = "--method gradcam needs no attention"
    elif channels is not None:
        hint = "take other --channels, or other --layers"
    # the heads of torchvision's transformers are zero until they are trained
    elif prepared.model.weights_note:
        hint = "load trained weights: random ones may let no gradient through"
    elif prepared.options.layers is not None:
        hint = "leave --layers out for the last layer that has a map"
    reasons = "; ".join(gaps(skipped, never_ran))
    raise UsageError(f"there is no class activation map; {reasons}", hint)


def _draw_over_input(
    evidence: _Evidence,
    image: ModelInput,
    options: DrawOptions,
    scale: Scale,
    outcome: Outcome,
) -> LayerCam:
    """Draw a map over what the model saw. The box or the edge of the region that the map
    explains is marked, except in clips.

    Args:
        evidence: the map, in the resolution of its layer.
        scale: how the map's values become levels.
        outcome: its `focus` is the box or the region.
    """
    picture = draw_maps(evidence.maps, options, scale)
    over = lay_over(picture, image.background(), options, image.window)
    pixels = np.asarray(to_image(over).convert("RGB"))
    values = evidence.maps.data[0].cpu().numpy()
    if len(values) == 1:  # no clip
        values = values[0]
        pixels = _with_marks(pixels, _in_window(outcome.focus, image))
    return LayerCam(
        site=evidence.site,
        values=values,
        picture=pixels,
        # a map of zeros has no limits
        limits=picture.limits.shared or (0.0, 0.0),
        channels=evidence.channels,
    )


def _shown_title(outcome: Outcome) -> str:
    """The title above the input. It names a region whose edge is marked; the name of a box
    stands beside the box."""
    if outcome.focus is None or isinstance(outcome.focus, Detection):
        return "input"
    return f"input, with the edge of {outcome.target_title}"


def _in_window(
    focus: Detection | Integers | None, image: ModelInput
) -> Detection | Integers | None:
    """Move a box, or cut the mask of a region, from the whole input to the part of it that
    is not padding (`image.window`)."""
    window = image.window
    if focus is None or window is None:
        return focus
    if isinstance(focus, Detection):
        x0, y0, x1, y1 = focus.box
        x0 -= window.left
        x1 -= window.left
        y0 -= window.top
        y1 -= window.top
        return replace(focus, box=(x0, y0, x1, y1))
    # the mask covers the input in its own resolution
    down = focus.shape[0] / image.args[0].shape[-2]
    across = focus.shape[1] / image.args[0].shape[-1]
    bottom = round(down * (window.top + window.height))
    right = round(across * (window.left + window.width))
    return focus[round(down * window.top) : bottom, round(across * window.left) : right]


def _with_marks(pixels: Bytes, focus: Detection | Integers | None) -> Bytes:
    """The picture with a box, or with the edge of a region, drawn into it.

    Args:
        pixels: uint8 [H, W, C].
        focus: a box in pixels of the picture; or a mask [h, w] of the region, which
            covers the picture. None marks nothing.
    """
    if focus is None:
        return pixels
    if pixels.shape[2] == 1:  # the marks are in colour
        pixels = np.repeat(pixels, 3, axis=2)
    if not isinstance(focus, Detection):
        return with_outline(pixels, focus)
    return with_boxes(pixels, [focus.box], [focus.text])


def _common_scale(evidence: Sequence[_Evidence], signed: bool) -> Scale:
    """One scale for the maps of all levels of a head. It ends at the greatest magnitude.

    Args:
        signed: whether the maps have evidence for and against the target. If so, the scale
            has 0 in the middle; if not, no value is below 0, and the scale begins at 0.
    """
    high = max(float(level.maps.data.abs().max()) for level in evidence)
    # maps of zeros have no range to draw
    if high == 0:
        return Scale("map")
    return Scale("range", (-high if signed else 0.0, high))


def _maximum_of_levels(evidence: Sequence[_Evidence], size: Sequence[int]) -> _Evidence:
    """A map in the size of the input, with the largest value of all levels at each pixel.
    The result has the capture site of the last level.

    Args:
        evidence: the maps of the levels, at least one, each in its own resolution.
        size: height and width of the input.
    """
    enlarged = []
    for level in evidence:
        data = level.maps.data.float()
        enlarged.append(functional.interpolate(data, list(size), mode="bilinear"))
    data = torch.stack(enlarged).amax(dim=0)
    return _Evidence(evidence[-1].site, Maps(evidence[-1].maps.layout, data))


def target_probability(target: str | None, outcome: Outcome) -> float | None:
    """The probability of the target's class; None if the target is not a class of a
    classifier.

    Under a softmax, the ratio of two probabilities is exp of the difference of the scores.
    Of the likeliest class both probability and score are known."""
    parsed = targets.parse(target)
    is_class = (
        parsed.kind in ("top1", "class") and not parsed.keys and parsed.layer is None
    )
    if not is_class or not outcome.prediction or outcome.target is None:
        return None
    likeliest = outcome.prediction[0]
    return likeliest.probability * math.exp(outcome.target - likeliest.score)
