"""The story of `look`: one image goes through a model, and one page shows its layers'
maps."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from featviz.drawing import colormap, grid, values
from featviz.drawing.channels import choose_channels, warn_of_missing
from featviz.drawing.drawer import draw, magnitude_and_phase
from featviz.drawing.outlines import with_boxes
from featviz.drawing.page import Page, PageBar, PageRow, draw_page
from featviz.drawing.picture import GridPicture, write_pixels
from featviz.drawing.sheet import Tile, resize
from featviz.drawing.values import to_rgb
from featviz.errors import NOTHING_DRAWN, FeatvizError, LayoutError, UsageError
from featviz.hooks.capture import Recorder
from featviz.hooks.layers import list_layers
from featviz.layout import to_floats
from featviz.layout.tracing.hints import HintBook
from featviz.models.load import LoadedModel
from featviz.options import DrawOptions, ModelOptions, RunOptions
from featviz.options.commands import LookOptions
from featviz.records import (
    Bytes,
    CaptureKey,
    CaptureSite,
    ClassScore,
    Detection,
    Floats,
    Layer,
    Outcome,
    RegionMap,
    Sample,
    Skip,
    finite,
)
from featviz.run.prepare import (
    ModelInput,
    Prepared,
    files_read,
    find_images,
    prepare,
    read_input,
)
from featviz.rundir.place import check_apart, check_file, picture_of, write_file
from featviz.text import (
    by,
    counted,
    gaps,
    layer_named,
    listed,
    quoted,
    ranges,
    safe_name,
)

log = logging.getLogger(__name__)

MOST_STAGES = 10
"""At most this many stages are shown."""
ALIKE = 0.9
"""Two maps look alike if their correlation is at least this."""
MOST_BOXES = 20
"""At most this many boxes of a detector are drawn."""
_BARS = 5
"""At most this many classes, boxes or regions are listed beside the input."""
_BOXED_SIDE = 420
"""Pixels of the longer side of an input with boxes."""
_COMPARED_SIDE = 64
"""Pixels of the longer side of the maps that are compared."""
_SMALLEST_PICTURE = 8
"""Pixels: an output whose shorter side is less is not shown as a picture."""
_NAMED_ZEROS = 8
"""A row names at most this many ranges of channels that are all zero."""
_LINE_LETTERS = 26
"""Letters of a line below a layer's name."""
_KEY = "the maps of each layer that vary most; near-duplicates are shown once"

Span = tuple[float | None, float | None]
"""The least and the greatest finite value; None if no value is finite."""


@dataclass(frozen=True)
class ShownLayer:
    """A layer's most telling maps."""

    layer: str
    type: str
    index: int
    call: int
    """Which of its calls gave the maps, from 0."""
    calls: int
    """How often the layer ran."""
    key: str
    shape: tuple[int, ...]
    layout: str
    maps: int
    """How many maps its tensor has, shown or not."""
    constant: int
    """How many of these maps have one value everywhere. They are shown only if all maps
    have."""
    nonfinite: int
    """How many values are NaN or infinite."""
    slice: tuple[int, int] | None
    """The index of the shown slice, and how many slices each map has; None for one."""
    channels: tuple[int, ...]
    """The channels of the shown maps, the most telling one first; for a strip the channels
    of the largest numbers."""
    ranges: tuple[Span, ...]
    """The range of each shown map, without the border that padding makes; for a strip one
    range, of all numbers."""
    strip: bool
    """Whether its numbers are shown as one strip: those of a vector, or of maps that are
    all constant."""
    tiles: Sequence[Bytes] = field(repr=False, compare=False, default=())
    """RGB [h, w, 3] of each shown map, not enlarged; for a strip one tile with all numbers.
    """
    all_zero: tuple[int, ...] = ()
    """The maps that are zero everywhere."""

    @property
    def name(self) -> str:
        """`relu`, or `relu.call1` for its second call; the class of the model itself."""
        address = CaptureKey(self.layer, "output", self.call, "")
        return (self.layer or self.type) + address.suffix

    @property
    def is_crossed(self) -> bool:
        """Whether a shown map is zero everywhere, and large enough for a cross."""
        # a strip has one row of pixels, too low for a cross
        has_room = len(self.tiles[0]) >= grid.SMALLEST
        return has_room and not set(self.all_zero).isdisjoint(self.channels)


@dataclass(frozen=True, repr=False)
class LookResult:
    """The page of one image, and what it shows."""

    path: Path
    model: str
    name: str
    input_shape: tuple[int, ...]
    preprocessing: str
    prediction: tuple[ClassScore, ...]
    detections: tuple[Detection, ...]
    """The boxes of a detector in pixels of the file's image; `box:N` has index N."""
    layers: tuple[ShownLayer, ...]
    left_out: tuple[str, ...]
    """Stages that are not shown, since there are more than MOST_STAGES."""
    skipped: tuple[Skip, ...]
    never_ran: tuple[str, ...]
    shown: Bytes = field(repr=False, compare=False)
    """What the model saw, uint8 [H, W, 3]."""
    remark: str = ""
    """If a detector found no box: `no box above the threshold`, and the best candidate;
    else empty."""
    picture: Bytes = field(
        repr=False, compare=False, default_factory=lambda: np.empty(0, np.uint8)
    )
    """The page, uint8 [H, W, 3]."""
    out: Path | None = None
    """The file of the page; None if the caller asked for no file, and `path` was
    temporary."""

    @property
    def image(self) -> Image.Image:
        """The page, mode RGB."""
        return Image.fromarray(self.picture)

    @property
    def input(self) -> Image.Image:
        """What the model saw, un-normalised, mode RGB."""
        return Image.fromarray(self.shown)

    def __repr__(self) -> str:
        prediction = f", {self.prediction[0].text}" if self.prediction else ""
        layers = counted(len(self.layers), "layer")
        return f"<LookResult of {self.name}: {layers}{prediction}>"

    def as_json(self) -> dict[str, Any]:
        """For programs: all but the pixels."""
        layers = []
        for layer in self.layers:
            row = dict(vars(layer))
            # without pixels: programs read the tensors of a run
            del row["tiles"]
            layers.append(row)
        return {
            "file": str(self.path),
            "model": self.model,
            "image": self.name,
            "input": {"shape": self.input_shape, "preprocessing": self.preprocessing},
            "prediction": list(map(asdict, self.prediction)),
            "detections": list(map(asdict, self.detections)),
            "layers": layers,
            "left_out": self.left_out,
            "skipped": list(map(asdict, self.skipped)),
            "never_ran": self.never_ran,
        }


def look(
    model: ModelOptions | LoadedModel, images: Sequence[str], options: LookOptions
) -> LookResult:
    """Draw one page: the input, the prediction, and the most telling maps of each
    layer.

    Args:
        images: as for `run`; the first one is shown.
        options: without `out`, the page is written into the current folder, under a name
            that is made of the names of model and image.

    Raises:
        FeatvizError: no such model, layer, image or colormap; the page's path is no PNG
            file, or exists already, and `overwrite` is not set; the model fails; or no
            layer gives maps.
    """
    colormap.check_cmap(options.cmap)
    run = RunOptions(
        layers=options.layers,
        # no limit on slices, since the one in the middle is shown
        draw=DrawOptions(cmap=options.cmap, max_slices=2**31),
        inputs=options.inputs,
    )
    samples = find_images(images, run)
    name = model_name(model)
    out = options.out or _picture_file(name, samples[0])
    check_files("look", [out], model, samples, options.overwrite)
    prepared = prepare(model, samples, run)
    if len(prepared.samples) > 1:
        first = quoted(prepared.samples[0].name)
        message = "the first of %d images, %s; name another one"
        log.info(message, len(prepared.samples), first)
    result = _show_and_draw(name + prepared.model.weights_note, prepared, options, out)
    channels = {row.name: range(row.maps) for row in result.layers}
    warn_of_missing(options.channels, channels)
    if result.left_out:
        count = len(result.layers)
        total = count + len(result.left_out)
        log.info("%d of %d stages; --layers takes others", count, total)
    with write_file(out) as file:
        write_pixels(file, result.picture, {"Software": "featviz look"})
    return result


def _picture_file(name: str, sample: Sample) -> Path:
    """The path of the page if --out gives none: a file in the current folder.

    Args:
        name: the model's name, as from `model_name`.
    """
    image = Path(sample.name).stem
    return Path(safe_name(f"look-{in_file_name(name)}-{image}.png"))


def model_name(model: ModelOptions | LoadedModel) -> str:
    """The name of a model in pictures: the last part of MODEL, or the class of a loaded
    module."""
    if isinstance(model, ModelOptions):
        return Path(model.spec).name
    return type(model.module).__name__


def in_file_name(model_name: str) -> str:
    """A model's name as a part of a picture's file name: `net-Net` for `net.py:Net`."""
    name = re.sub(r"\.(pth|pt2?|ckpt|bin|safetensors|py)\b", "", model_name)
    # Windows allows no colon in the name of a file
    return name.replace(":", "-")


def _show_and_draw(
    name: str, prepared: Prepared, options: LookOptions, out: Path
) -> LookResult:
    """Show the image to the model, and draw the page with the maps of its layers.

    Args:
        name: the name of the model, for the page.
        out: the path of the page, for the result. The caller writes the file.

    Raises:
        FeatvizError: the image cannot be read, the model fails, or no layer gives maps.
    """
    stages = prepared.layers
    if options.layers is None:
        stages = spread_stages(stages)
    image = read_input(
        prepared.samples[0], prepared.model.preprocess, prepared.options.inputs
    )
    collector = _Collector(
        stages, prepared.hints(image.args), prepared.options.draw, options
    )
    # The model itself is watched, too: its output may be a picture.
    root = list_layers(prepared.model.module)[0]
    watched = list(stages)
    if root not in stages:
        watched.append(root)
    with prepared.watched(watched) as show:
        outcome, recorder = show(image.args, collector.hints, collector.take)
    result = LookResult(
        path=out,
        model=name,
        name=prepared.samples[0].name,
        input_shape=tuple(image.args[0].shape),
        preprocessing=image.words,
        prediction=outcome.prediction,
        detections=image.in_file(outcome.detections),
        layers=_shown_layers(collector, recorder),
        left_out=tuple(layer.name for layer in prepared.layers if layer not in stages),
        skipped=tuple(recorder.skipped),
        never_ran=tuple(layer.name for layer in recorder.never_ran),
        shown=_input_picture(image),
        remark=outcome.remark,
    )
    return replace(result, picture=_page(result, outcome, collector, options))


def check_files(
    command: str,
    paths: Iterable[Path],
    model: ModelOptions | LoadedModel,
    samples: Sequence[Sample],
    overwrite: bool,
    formats: Sequence[str] = ("png",),
) -> None:
    """Check where `look`, `cam` or `field` write their pictures, before the model is loaded.

    Args:
        command: the name of the command; pictures that it made earlier may be replaced.
        paths: the paths of the pictures.
        samples: the images, none of which may be overwritten.
        overwrite: whether any other file may be replaced, too.
        formats: those that the command writes, which are endings of files.

    Raises:
        UsageError: a path has another ending, is read as an input, or holds a file that may
            not be replaced.
    """
    inputs = files_read(model, samples)
    for path in paths:
        if path.suffix.lower()[1:] not in formats:
            png = quoted(str(path.with_suffix(".png")))
            written = ", ".join(formats).upper()
            raise UsageError(
                f"--out {quoted(str(path))}: {command} writes {written}", f"--out {png}"
            )
        check_apart(path, "--out", inputs)
        check_file(path, picture_of(command), overwrite=overwrite)


def spread_stages(stages: Sequence[Layer]) -> list[Layer]:
    """Choose at most MOST_STAGES of the stages, evenly spread. The first and the last stage
    are always chosen."""
    if len(stages) <= MOST_STAGES:
        return list(stages)
    return [
        stages[round(number)] for number in np.linspace(0, len(stages) - 1, MOST_STAGES)
    ]


def _input_picture(image: ModelInput) -> Bytes:
    """What the model saw, uint8 [H, W, 3]; for a clip or a volume the slice in the
    middle."""
    picture = image.preprocess.shown(image.args)[0]
    if image.args[0].ndim == 5:
        slices = image.preprocess.pictures(image.args[:1])
        picture = slices[len(slices) // 2][0]
    return to_rgb(picture)


class _Collector:
    """Keeps the most telling maps of each stage while the model runs, and a picture of the
    model's output."""

    def __init__(
        self,
        stages: Sequence[Layer],
        hints: HintBook,
        draw_options: DrawOptions,
        options: LookOptions,
    ) -> None:
        """Begin without maps.

        Args:
            stages: the layers of which maps are kept.
        """
        self.hints = hints
        self.layers: list[ShownLayer] = []
        """In the order in which they ran; the page shows those of `rows`."""
        self.output_shapes: list[str] = []
        self.output_picture: Tile | None = None
        self._stages = {layer.name for layer in stages}
        self._positions: dict[str, int] = {}
        """By name of the layer: the index of its latest row in `layers`."""
        self._draw_options = draw_options
        self._options = options

    def take(self, site: CaptureSite, tensor: Tensor) -> None:
        """The sink of the hooks. Of the tensors that a call of a stage returns, keep the
        first one with maps; if none has maps, the first one.

        Raises:
            LayoutError: the tensor cannot be drawn, or has none of the chosen channels.
        """
        name = site.layer.name
        # the empty name is that of the model itself, whose output stands at the page's top
        if not name and not tensor.is_nested:
            self._note_output(site.key, tensor)
        if name not in self._stages:
            return
        before = self._latest(name)
        if before is not None and not before.strip and site.call == before.call:
            return
        hints = self.hints.of_tensor(site, tensor)
        # of complex numbers the magnitude is shown, which is the first of two captures
        if tensor.is_complex():
            captures = magnitude_and_phase(site, tensor, hints, DrawOptions())
            site, tensor, hints = next(captures)
        picture = draw(self._draw_options, site, tensor, hints, inner=True)[""]
        self._add(_most_telling(site, tensor, picture, self._options))

    def _note_output(self, key: str, tensor: Tensor) -> None:
        """Note the shape of an output of the model, and make a picture of the first one."""
        if not self.output_shapes:
            input_size = self.hints.input_shape[-2:]
            self.output_picture = _output_picture(key, tensor, input_size)
        self.output_shapes.append(by(tensor.shape))

    def _latest(self, name: str) -> ShownLayer | None:
        """The latest row of a layer; None if it has no row yet."""
        if name not in self._positions:
            return None
        return self.layers[self._positions[name]]

    def _add(self, row: ShownLayer) -> None:
        """Add the row of a call, replace the layer's latest row by it, or drop it."""
        before = self._latest(row.layer)
        if before is not None:
            if row.strip:
                return
            size = row.tiles[0].shape
            # if a block runs its activation twice, the second call gives the block's output
            if before.strip or size == before.tiles[0].shape:
                self.layers[self._positions[row.layer]] = row
                return
            # The maps have another size. With --layers, a layer has one row: that of its
            # largest maps, as where a detector's head runs on several levels. Without
            # --layers, a module that ends several stages, as the only ReLU of a network
            # may, has a row for each of them.
            if self._options.layers is not None:
                if size > before.tiles[0].shape:
                    self.layers[self._positions[row.layer]] = row
                return
        self._positions[row.layer] = len(self.layers)
        self.layers.append(row)

    @property
    def rows(self) -> list[ShownLayer]:
        """The first row of each layer, and each later row that ends a stage: the row after
        it has maps of another size, or there is none."""
        rows: list[ShownLayer] = []
        for row, below in zip_longest(self.layers, self.layers[1:]):
            is_first = all(row.layer != earlier.layer for earlier in rows)
            size = row.tiles[0].shape
            if is_first or below is None or below.tiles[0].shape != size:
                rows.append(row)
        return rows


def _shown_layers(collector: _Collector, recorder: Recorder) -> tuple[ShownLayer, ...]:
    """The layers that have maps. Warns of NaN and infinite values.

    Raises:
        FeatvizError: no layer has maps; the message has the reasons.
    """
    if not collector.layers:
        skipped = {skip.label: skip.reason for skip in recorder.skipped}
        reasons = gaps(skipped, [layer.name for layer in recorder.never_ran])
        reason = "; ".join(reasons) or "no layer was taken"
        raise FeatvizError(f"no picture was drawn; {reason}", NOTHING_DRAWN)
    layers = []
    # only now, after the pass, it is known how often each layer ran
    for layer in collector.rows:
        if layer.nonfinite:
            message = "%s holds %d NaN or infinite values, shown in magenta"
            log.warning(
                message, layer_named(layer.layer or layer.type), layer.nonfinite
            )
        layers.append(replace(layer, calls=recorder.calls[layer.layer]))
    return tuple(layers)


def _page(
    result: LookResult,
    outcome: Outcome,
    collector: _Collector,
    options: LookOptions,
) -> Bytes:
    """The page, uint8 [H, W, 3]."""
    head = _head(result, outcome, collector)
    # each step of the preprocessing gets a line: split at commas that are not in brackets
    steps = re.split(r", (?![^\[(]*[\])])", result.preprocessing)
    page = Page(
        title=result.model,
        subtitle=f"{result.name}   input {by(result.input_shape)}",
        pictures=head.pictures,
        bars=head.bars,
        bars_title=head.bars_title,
        remarks=[*head.remarks, "preprocessing", *steps],
        rows=[page_row(layer) for layer in result.layers],
        key=_KEY if options.channels is None else f"channels {options.channels}",
        cmap=options.cmap,
    )
    if any(layer.is_crossed for layer in result.layers):
        page = replace(
            page,
            color_key_note="max of each map, without padding's border; cross: all zero",
        )
    return draw_page(page)


class _Head(NamedTuple):
    """The top of the page: the input, and the model's output."""

    pictures: Sequence[Tile]
    bars: Sequence[PageBar] = ()
    bars_title: str = ""
    remarks: Sequence[str] = ()
    """Lines that are shown if there are no bars."""


def _head(result: LookResult, outcome: Outcome, collector: _Collector) -> _Head:
    """The top of the page. It shows the first of these that there is: the boxes of a
    detector, the regions of a segmentation, the classes of a classifier, the output as a
    picture, the shape of the output.

    Args:
        outcome: the model's answer.
        collector: has the shapes of the outputs, and the picture of the first one.
    """
    seen = Tile("input", result.shown)
    picture = collector.output_picture
    if outcome.detections:
        return _head_of_boxes(result.shown, outcome.detections)
    regions = outcome.regions
    is_picture = picture is not None and not picture.title.startswith("classes")
    # If the output is a picture, as of a model that denoises, the picture is shown, since
    # its channels may be mistaken for the classes of a segmentation.
    if regions is not None and not is_picture:
        if picture is None:
            pixels = class_colors()[regions.winners % 256]
            picture = Tile(f"classes {by(regions.winners.shape)}", pixels)
        title = "regions, with their shares of the pixels"
        return _Head([seen, picture], _region_bars(regions), title)
    if result.prediction:
        bars = [PageBar(guess.title, guess.probability) for guess in result.prediction]
        return _Head([seen], bars, "prediction")
    if picture is not None:
        return _Head([seen, picture])
    remarks = [result.remark] if result.remark else []
    if collector.output_shapes:
        remarks.append(f"output {listed(collector.output_shapes, 3)}")
    return _Head([seen], remarks=[*remarks, ""] if remarks else [])


def _head_of_boxes(shown: Bytes, detections: Sequence[Detection]) -> _Head:
    """The top of the page for a detector: the input with the first boxes, numbered, and
    their scores.

    Args:
        shown: the input, uint8 [H, W, 3].
        detections: at least one, the most confident first; boxes in pixels of `shown`.
    """
    drawn = detections[:MOST_BOXES]
    count = len(detections)
    title = "1 box"
    if count > 1:
        title = f"boxes 0 to {len(drawn) - 1} of {count}"
    bars = []
    for number, detection in enumerate(drawn[:_BARS]):
        bars.append(PageBar(f"{number}  {detection.title}", detection.score))
    return _Head(
        [Tile(title, _with_numbered_boxes(shown, drawn))],
        bars,
        "boxes, with their scores",
    )


def _with_numbered_boxes(shown: Bytes, detections: Sequence[Detection]) -> Bytes:
    """The input with numbered boxes. It gets about the size in which the page shows it, so
    that the numbers can be read.

    Args:
        shown: the input, uint8 [H, W, 3].
        detections: boxes in pixels of `shown`.
    """
    height, width = shown.shape[:2]
    factor = _BOXED_SIDE / max(height, width)
    # a small input is enlarged by a whole factor: its pixels stay squares
    if factor > 1:
        factor = int(factor)
    image = resize(Image.fromarray(np.ascontiguousarray(shown)), factor)
    boxes = []
    for detection in detections:
        boxes.append([edge * factor for edge in detection.box])
    numbers = list(map(str, range(len(boxes))))
    return with_boxes(np.asarray(image), boxes, numbers)


def _region_bars(regions: RegionMap) -> list[PageBar]:
    """A legend of the largest regions, in the colours of the picture of the output."""
    bars = []
    # -1 stands for `no class` in a model of one class: one region needs no colours
    has_colors = regions.winners.min() >= 0
    for index in regions.largest[:_BARS]:
        color = class_colors()[index % 256] if has_colors else None
        bars.append(PageBar(regions.title(index), regions.share(index), color))
    return bars


def class_colors() -> Bytes:
    """An arbitrary colour for each class, uint8 [256, 3]."""
    # 97 and 256 have no common divisor, so that each class gets a colour of its own, and
    # neighbours in the list of classes get unlike ones
    return colormap.ramp("turbo")[np.arange(256) * 97 % 256]


def _output_picture(key: str, output: Tensor, input_size: Sequence[int]) -> Tile | None:
    """An output of the model as a picture. One or three channels are pixels. Scores of a
    segmentation show the likeliest class of each place, each class in an arbitrary colour.

    Args:
        key: the key of the tensor in the output; empty for an output that is a tensor.
        output: a tensor of any shape.
        input_size: height and width of the input.

    Returns:
        None for an output that is neither pixels nor scores: another shape than [1, C, H,
        W], a side below `_SMALLEST_PICTURE`, many channels in another size than the
        input's. None also for numbers that are not all finite, or not real.
    """
    shape = tuple(output.shape)
    if len(shape) != 4 or shape[0] != 1 or min(shape[2:]) < _SMALLEST_PICTURE:
        return None
    # Hugging Face calls the scores of classes `logits`, and torchvision calls them `out`.
    # Under another key, maps of the input's size are taken for scores, and others for
    # features, which are no picture.
    channels = shape[1]
    are_scores = key in ("logits", "out") and channels > 1
    is_pixels = channels in (1, 3) and not are_scores
    if not (is_pixels or are_scores or shape[2:] == tuple(input_size)):
        return None
    try:
        numbers = to_floats(output)[0]
    except LayoutError:
        return None
    if not numbers.isfinite().all():
        return None
    if is_pixels:
        return Tile(f"output {by(shape)}", _as_pixels(numbers))
    likeliest = numbers.argmax(0).cpu().numpy()
    return Tile(f"classes {by(shape)}", class_colors()[likeliest % 256])


def _as_pixels(numbers: Tensor) -> Bytes:
    """Finite floats [C, H, W] as RGB. Values in 0..1 keep their brightness; if some lie
    beyond, the range from the least to the greatest is stretched to 0..1."""
    low = float(numbers.min())
    high = float(numbers.max())
    # the output of a network that was trained for 0..1 may go a little beyond
    if low < -0.05 or high > 1.05:
        numbers = (numbers - low) / max(high - low, 1e-30)
    return to_rgb(numbers.clamp(0, 1))


def _most_telling(
    site: CaptureSite, tensor: Tensor, picture: GridPicture, options: LookOptions
) -> ShownLayer:
    """The row of a tensor: its most telling maps, or those of `--channels`.

    Args:
        tensor: as the layer returned it; only its shape is read.
        picture: the grid of the tensor, with all channels and slices.
        options: `maps` is how many maps are shown, `channels` which ones.

    Raises:
        LayoutError: the tensor has none of these channels.
    """
    stats = picture.stats
    slices = picture.slices[0]
    # of a clip or a volume the slice in the middle is shown
    maps = picture.tiles[:][slices // 2 :: slices]
    channels = _telling_channels(picture, maps, options)
    return ShownLayer(
        layer=site.layer.name,
        type=site.layer.type,
        index=site.layer.index,
        call=site.call,
        calls=1,  # `_shown_layers` puts in the count, when the pass has ended
        key=site.key,
        shape=tuple(tensor.shape),
        layout=picture.layout,
        maps=len(stats),
        constant=0 if picture.values == 1 else int(values.is_constant(stats).sum()),
        nonfinite=int(stats[:, values.NONFINITE].sum()),
        slice=(slices // 2, slices) if slices > 1 else None,
        channels=tuple(channels),
        ranges=tuple(_ranges(picture, channels)),
        strip=picture.strip,
        tiles=_shown_tiles(picture, maps, channels),
        all_zero=tuple(np.flatnonzero(stats[:, values.ZEROS] == 1).tolist()),
    )


def _telling_channels(
    picture: GridPicture, maps: Bytes, options: LookOptions
) -> list[int]:
    """The channels to show: those of `--channels`, or else the most telling ones, the most
    telling one first.

    Args:
        maps: levels of one slice of each channel, uint8 [C, H, W].

    Raises:
        LayoutError: the tensor has none of the channels of `--channels`.
    """
    stats = picture.stats
    if options.channels is not None:
        means = stats[:, values.MEAN]
        candidates = range(len(stats))
        return choose_channels(options.channels, candidates, means, picture.deviations)
    channels = rank_channels(stats, picture.deviations)
    if picture.strip:
        return channels[: options.maps]
    return choose_unlike(maps, channels, options.maps)


def _shown_tiles(
    picture: GridPicture, maps: Bytes, channels: Sequence[int]
) -> list[Bytes]:
    """The map of each shown channel with its mark, RGB [h, w, 3]; for a strip one tile with
    the numbers of all channels.

    Args:
        maps: as in `_telling_channels`.
        channels: the shown channels.
    """
    colors = colormap.color_table(picture.palette)
    if picture.strip:
        return [colors[np.concatenate(list(maps), axis=1)]]
    marks = picture.marks[:: picture.slices[0]]
    tiles = []
    for channel in channels:
        tile = maps[channel].copy()
        grid.draw_marks(tile[None, None, ..., None], marks[[channel]], picture.palette)
        tiles.append(colors[tile])
    return tiles


def _ranges(picture: GridPicture, channels: Sequence[int]) -> list[Span]:
    """The range of each channel: the values that are drawn darkest and brightest in its map,
    or if all maps share a scale, its least and greatest value. For a strip one range, of
    all numbers."""
    lows = picture.stats[:, values.MIN]
    highs = picture.stats[:, values.MAX]
    if picture.limits.shared is None:
        # the slices of a channel share its limits
        slices = picture.slices[0]
        lows = picture.limits.low[::slices]
        highs = picture.limits.high[::slices]
    if picture.strip:
        # fmin and fmax ignore NaN, which a channel without finite values has
        return [_finite_span(np.fmin.reduce(lows), np.fmax.reduce(highs))]
    return [_finite_span(lows[channel], highs[channel]) for channel in channels]


def _finite_span(low: np.float32, high: np.float32) -> Span:
    """A range, with None in place of NaN and infinity."""
    return finite(float(low)), finite(float(high))


def rank_channels(stats: Floats, deviations: Floats) -> list[int]:
    """Order channels by how much their maps vary, the largest deviation first. Constant maps
    are left out. If all maps are constant, order them by their mean, the largest first.

    Channels without a finite value come last; equal channels stay in their order.

    Args:
        stats: the statistics of the channels, [C, 6].
        deviations: standard deviations of the maps without the border that padding makes,
            [C].
    """
    constant = values.is_constant(stats)
    strength = stats[:, values.MEAN] if constant.all() else deviations
    keys = np.nan_to_num(-strength, nan=np.inf)
    order = [int(channel) for channel in np.argsort(keys, kind="stable")]
    return [channel for channel in order if not constant[channel]] or order


def choose_unlike(maps: Bytes, order: Sequence[int], count: int) -> list[int]:
    """Choose channels in order, and pass over a channel that is blank, or whose map looks
    like that of a chosen one.

    Args:
        maps: levels, uint8 [C, H, W].
        order: channels, the most telling one first.
        count: how many channels are returned. If too few are left, those that were passed
            over follow, in their order.
    """
    # maps that look alike do so at 64 pixels, too, so rows and columns may be left out
    step = max(1, max(maps.shape[1:]) // _COMPARED_SIDE)
    chosen: list[int] = []
    alike: list[int] = []
    rows = np.empty((0, maps[0, ::step, ::step].size), np.float32)
    for channel in order:
        # the product of two centred rows of length 1 is their correlation
        row = maps[channel, ::step, ::step].ravel().astype(np.float32)
        row -= row.mean()
        length = float(np.linalg.norm(row))
        row /= max(length, 1e-6)
        is_blank = length < 1e-6
        if is_blank or (len(rows) and float((rows @ row).max()) >= ALIKE):
            alike.append(channel)
            continue
        chosen.append(channel)
        rows = np.vstack([rows, row])
        if len(chosen) == count:
            break
    return (chosen + alike)[:count]


def page_row(layer: ShownLayer) -> PageRow:
    """A layer's row on the page."""
    titles = [str(channel) for channel in layer.channels]
    # a strip has no room for the titles of all numbers: a line names the largest ones
    if layer.strip:
        low, high = layer.ranges[0]
        remark = f"largest at {', '.join(titles)}"
        if low == high:
            remark = "all equal"
        titles = [f"{counted(layer.maps, 'number')}, {remark}"]
    tiles = []
    for title, pixels, span in zip(titles, layer.tiles, layer.ranges, strict=True):
        tiles.append(Tile(title, pixels, note=_span(span)))
    return PageRow(layer_named(layer.name), _remarks(layer), tiles, layer.strip)


def _remarks(layer: ShownLayer) -> list[str]:
    """The lines below a layer's name: its type and shape, and anything unusual."""
    lines = [layer.type, by(layer.shape)]
    if layer.slice is not None:
        lines.append(f"middle of {layer.slice[1]} slices")
    # on a scale of its own, every map of one pixel would have the same grey
    if not layer.strip and layer.tiles[0].shape[:2] == (1, 1):
        lines.append("one scale for all")
    if layer.calls > 1:
        number = "one" if layer.call else "first"
        lines.append(f"{number} of {layer.calls} calls")
    if layer.constant:
        lines += _constant_lines(layer)
    if layer.nonfinite:
        lines.append(f"{layer.nonfinite} NaN or infinite")
    return lines


def _constant_lines(layer: ShownLayer) -> list[str]:
    """`2 of 16 all zero: 1, 9`, broken into lines of the column of names. The layer must
    have a constant map."""
    zeros = len(layer.all_zero)
    adjective = "all zero" if zeros == layer.constant else "constant"
    line = f"{layer.constant} of {layer.maps} {adjective}"
    # no list if all maps are zero
    if 0 < zeros < layer.maps:
        named = ranges(layer.all_zero, _NAMED_ZEROS, comma=", ")
        line += f": {named}" if zeros == layer.constant else f", zero: {named}"
    return wrap(line, _LINE_LETTERS)


def _span(span: Span) -> str:
    """`0.013 … 1.2`, or `≈0.013` if both ends have the same text."""
    low, high = span
    if low is None or high is None:
        return ""
    first, last = _brief(low), _brief(high)
    if first != last:
        return f"{first} … {last}"
    return first if low == high else f"≈{first}"


def _brief(value: float) -> str:
    """A number as a short text: 0.013, 1.2, 350, 2e-6. A magnitude below 0.01, or of 100000
    and more, is written with a power of ten."""
    if value == 0 or 0.01 <= abs(value) < 1e5:
        return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"
    base, _, power = f"{value:.1e}".partition("e")
    return f"{float(base):g}e{int(power)}"
