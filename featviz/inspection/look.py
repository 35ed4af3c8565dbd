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
from featviz.drawing.channels import choose_channels, warn_of_lacking
from featviz.drawing.drawer import draw, magnitude_and_phase
from featviz.drawing.outlines import with_boxes
from featviz.drawing.page import Page, PageBar, PageRow, draw_page
from featviz.drawing.picture import GridPicture, write_pixels
from featviz.drawing.sheet import Tile, resized
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
"""Stages that are shown at most."""
ALIKE = 0.9
"""Correlation from which on a map looks like another that is shown already."""
MOST_BOXES = 20
"""Boxes of a detector that are drawn."""
_BARS = 5
"""Classes, boxes or regions that are listed beside the input."""
_BOXED_SIDE = 420
"""Pixels of the longer side of an input with boxes."""
_COMPARED_SIDE = 64
"""Pixels of the longer side of the maps that are compared."""
_SMALLEST_PICTURE = 8
"""Pixels of the shorter side from which an output is shown as a picture."""
_NAMED_ZEROS = 8
"""Channels of zeros that a row names."""
_LINE_LETTERS = 26
"""Letters of a line below a layer's name."""
_KEY = "the maps of each layer that vary most; near-duplicates are shown once"

Span = tuple[float | None, float | None]
"""The least and the greatest finite value; None where there is none."""


@dataclass(frozen=True)
class ShownLayer:
    """A layer's most telling maps."""

    layer: str
    type: str
    index: int
    call: int
    """Which of its calls gave the maps, from 0: the last one whose maps are as large as
    the first."""
    calls: int
    """How often it ran."""
    key: str
    shape: tuple[int, ...]
    layout: str
    maps: int
    """How many maps its tensor has, shown or not."""
    constant: int
    """How many of them have one value everywhere, and are not shown beside others."""
    nonfinite: int
    slice: tuple[int, int] | None
    """Which slice of each map is shown, and of how many, where it has several."""
    channels: tuple[int, ...]
    """The shown maps, the most telling one first; of a vector its largest numbers."""
    ranges: tuple[Span, ...]
    """The range of each shown map, without the border that padding makes; or that of all
    numbers of a vector."""
    strip: bool
    """Its numbers are one strip: those of a vector, or of maps that are all constant.
    """
    tiles: Sequence[Bytes] = field(repr=False, compare=False, default=())
    """RGB [h, w, 3] of each map, not enlarged; of a vector the one strip of all its
    numbers."""
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
        # the strip of constant maps has a row of pixels, one for each
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
    """The boxes of a detector in pixels of the file's image, as `box:N` numbers them.
    """
    layers: tuple[ShownLayer, ...]
    left_out: tuple[str, ...]
    """Stages that are not shown, since there are more than MOST_STAGES."""
    skipped: tuple[Skip, ...]
    never_ran: tuple[str, ...]
    shown: Bytes = field(repr=False, compare=False)
    """What the model saw, uint8 [H, W, 3]."""
    remark: str = ""
    """For a detector without a box: `no box above the threshold`, and what is nearest to
    one; else empty."""
    picture: Bytes = field(
        repr=False, compare=False, default_factory=lambda: np.empty(0, np.uint8)
    )
    """The page, uint8 [H, W, 3]."""
    out: Path | None = None
    """The file of the picture; None where a caller wanted none, and `path` is gone."""

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
            # pixels are for eyes: programs read the tensors of a run
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
        options: without `out`, the page is written into the current folder, by the
            names of model and image.

    Raises:
        FeatvizError: no such model, layer, image or colormap; the page's file is no PNG,
            or is there already, without `overwrite`; the model fails; or no layer gives
            maps.
    """
    colormap.check_cmap(options.cmap)
    run = RunOptions(
        layers=options.layers,
        # all slices are drawn, since the one in the middle is shown
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
    result = _see(name + prepared.model.weights_note, prepared, options, out)
    channels = {row.name: range(row.maps) for row in result.layers}
    warn_of_lacking(options.channels, channels)
    if result.left_out:
        count = len(result.layers)
        total = count + len(result.left_out)
        log.info("%d of %d stages; --layers takes others", count, total)
    with write_file(out) as file:
        write_pixels(file, result.picture, {"Software": "featviz look"})
    return result


def _picture_file(name: str, sample: Sample) -> Path:
    """The file of the page where --out names none, in the current folder.

    Args:
        name: the model's, as from `model_name`.
    """
    image = Path(sample.name).stem
    return Path(safe_name(f"look-{in_file_name(name)}-{image}.png"))


def model_name(model: ModelOptions | LoadedModel) -> str:
    """The last part of a model's path or name, for pictures; of a module its class."""
    if isinstance(model, ModelOptions):
        return Path(model.spec).name
    return type(model.module).__name__


def in_file_name(model_name: str) -> str:
    """A model's name as a part of a picture's file name: `net-Net` for `net.py:Net`."""
    name = re.sub(r"\.(pth|pt2?|ckpt|bin|safetensors|py)\b", "", model_name)
    # no file of Windows has a colon in its name
    return name.replace(":", "-")


def _see(name: str, prepared: Prepared, options: LookOptions, out: Path) -> LookResult:
    """Show the image to the model, and draw the page of what its layers make of it.

    Args:
        name: of the model, for the page.
        out: the page's file, which the result names, and the caller writes.

    Raises:
        FeatvizError: the image cannot be read, the model fails, or no layer gives maps.
    """
    stages = prepared.layers
    if options.layers is None:
        stages = spread(stages)
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
        shown=_seen(image),
        remark=outcome.remark,
    )
    return replace(result, picture=_page(result, outcome, collector, options))


def check_files(
    command: str,
    paths: Iterable[Path],
    model: ModelOptions | LoadedModel,
    samples: Sequence[Sample],
    overwrite: bool,
) -> None:
    """Refuse bad files for the pictures of `look`, `cam` or `field`, before the model is
    loaded.

    Args:
        command: its name, by which its earlier pictures are known.
        paths: of the pictures.
        samples: the images, none of which may be overwritten.
        overwrite: replace any file, also one of another command.

    Raises:
        UsageError: a file is not a PNG, is read as an input, or is there already.
    """
    inputs = files_read(model, samples)
    for path in paths:
        if path.suffix.lower() != ".png":
            png = quoted(str(path.with_suffix(".png")))
            raise UsageError(
                f"--out {quoted(str(path))}: {command} writes PNG", f"--out {png}"
            )
        check_apart(path, "--out", inputs)
        check_file(path, picture_of(command), overwrite=overwrite)


def spread(stages: Sequence[Layer]) -> list[Layer]:
    """At most MOST_STAGES of the stages, evenly spread, the first and the last among
    them."""
    if len(stages) <= MOST_STAGES:
        return list(stages)
    return [
        stages[round(number)] for number in np.linspace(0, len(stages) - 1, MOST_STAGES)
    ]


def _seen(image: ModelInput) -> Bytes:
    """What the model saw, uint8 [H, W, 3]. A clip or a volume is shown by the slice in
    the middle."""
    picture = image.preprocess.shown(image.args)[0]
    if image.args[0].ndim == 5:
        slices = image.preprocess.pictures(image.args[:1])
        picture = slices[len(slices) // 2][0]
    return to_rgb(picture)


class _Collector:
    """Keeps the most telling maps of each stage while the model runs, and pictures its
    output."""

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
        """In the order in which they ran; `rows` are shown of them."""
        self.output_shapes: list[str] = []
        self.output_picture: Tile | None = None
        self._stages = {layer.name for layer in stages}
        self._positions: dict[str, int] = {}
        """Where the latest row of each layer stands in `layers`, by the layer's name."""
        self._draw_options = draw_options
        self._options = options

    def take(self, site: CaptureSite, tensor: Tensor) -> None:
        """The sink of the hooks. It keeps the first maps that each call of a stage gives;
        numbers only where the call gives no maps."""
        name = site.layer.name
        # the empty name is that of the model itself, whose outputs head the page
        if not name and not tensor.is_nested:
            self._note_output(site.key, tensor)
        if name not in self._stages:
            return
        before = self._latest(name)
        if before is not None and not before.strip and site.call == before.call:
            return
        hints = self.hints.of_tensor(site, tensor)
        # complex numbers are shown by their magnitude, which comes before the phase
        if tensor.is_complex():
            captures = magnitude_and_phase(site, tensor, hints, DrawOptions())
            site, tensor, hints = next(captures)
        picture = draw(self._draw_options, site, tensor, hints, inner=True)[""]
        self._add(_most_telling(site, tensor, picture, self._options))

    def _note_output(self, key: str, tensor: Tensor) -> None:
        """Keep the shape of an output of the model, and the picture of the first one."""
        if not self.output_shapes:
            input_size = self.hints.input_shape[-2:]
            self.output_picture = _output_picture(key, tensor, input_size)
        self.output_shapes.append(by(tensor.shape))

    def _latest(self, name: str) -> ShownLayer | None:
        """The latest row of a layer; None before its first one."""
        if name not in self._positions:
            return None
        return self.layers[self._positions[name]]

    def _add(self, row: ShownLayer) -> None:
        """Add the row of a call, or put it in the place of the layer's latest row."""
        before = self._latest(row.layer)
        if before is not None:
            if row.strip:
                return
            size = row.tiles[0].shape
            # the activation that a block runs twice gives the block's output at the end
            if before.strip or size == before.tiles[0].shape:
                self.layers[self._positions[row.layer]] = row
                return
            # A head runs on one level after the other, of which the first is the largest.
            # Without --layers, a module that ends several stages, as the one ReLU of a
            # network may, has a row for each of them.
            if self._options.layers is not None:
                if size > before.tiles[0].shape:
                    self.layers[self._positions[row.layer]] = row
                return
        self._positions[row.layer] = len(self.layers)
        self.layers.append(row)

    @property
    def rows(self) -> list[ShownLayer]:
        """The first row of each layer, and those of its later calls that end a stage,
        which is where the next row has maps of another size."""
        rows: list[ShownLayer] = []
        for row, below in zip_longest(self.layers, self.layers[1:]):
            is_first = all(row.layer != earlier.layer for earlier in rows)
            size = row.tiles[0].shape
            if is_first or below is None or below.tiles[0].shape != size:
                rows.append(row)
        return rows


def _shown_layers(collector: _Collector, recorder: Recorder) -> tuple[ShownLayer, ...]:
    """The layers of which there are maps; FeatvizError with the reasons where there are
    none."""
    if not collector.layers:
        skipped = {skip.label: skip.reason for skip in recorder.skipped}
        reasons = gaps(skipped, [layer.name for layer in recorder.never_ran])
        reason = "; ".join(reasons) or "no layer was taken"
        raise FeatvizError(f"no picture was drawn; {reason}", NOTHING_DRAWN)
    layers = []
    # how often a layer ran is known only now, when the pass has ended
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
    # each step gets a line; they stand between commas, but for those inside brackets
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
    """The top of the page: the input, and what the model made of it."""

    pictures: Sequence[Tile]
    bars: Sequence[PageBar] = ()
    bars_title: str = ""
    remarks: Sequence[str] = ()
    """Shown where there are no bars."""


def _head(result: LookResult, outcome: Outcome, collector: _Collector) -> _Head:
    """The top of the page: with the boxes of a detector, the regions of a segmentation, the
    classes of a classifier, the output as a picture, or else its shape.

    Args:
        outcome: what the model said of the input.
        collector: has the shapes of the outputs, and the picture of the first one.
    """
    seen = Tile("input", result.shown)
    picture = collector.output_picture
    if outcome.detections:
        return _head_of_boxes(result.shown, outcome.detections)
    regions = outcome.regions
    is_picture = picture is not None and not picture.title.startswith("classes")
    # A model that returns a picture, such as one that denoises, is shown by it: its
    # channels may look like the classes of a segmentation.
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
    """The input with the first boxes of a detector, which are numbered.

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
    return _Head([Tile(title, _boxed(shown, drawn))], bars, "boxes, with their scores")


def _boxed(shown: Bytes, detections: Sequence[Detection]) -> Bytes:
    """The input with numbered boxes, in about the size in which the page shows it, so
    that the numbers can be read."""
    height, width = shown.shape[:2]
    factor = _BOXED_SIDE / max(height, width)
    # a small input is enlarged by a whole factor: its pixels stay squares
    if factor > 1:
        factor = int(factor)
    image = resized(Image.fromarray(np.ascontiguousarray(shown)), factor)
    boxes = []
    for detection in detections:
        boxes.append([edge * factor for edge in detection.box])
    numbers = list(map(str, range(len(boxes))))
    return with_boxes(np.asarray(image), boxes, numbers)


def _region_bars(regions: RegionMap) -> list[PageBar]:
    """A legend of the largest regions, in the colours of the picture of the output."""
    bars = []
    # a model of one class has -1 for none: there is nothing to tell apart by colours
    has_colors = regions.winners.min() >= 0
    for index in regions.largest[:_BARS]:
        color = class_colors()[index % 256] if has_colors else None
        bars.append(PageBar(regions.title(index), regions.share(index), color))
    return bars


def class_colors() -> Bytes:
    """A colour for each class, uint8 [256, 3], which means nothing."""
    # 97 has no divisor in common with 256: neighbours in the list of classes differ
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
    """The most telling maps of a tensor that is drawn, or those of `--channels`.

    Args:
        tensor: as the layer returned it; only its shape counts.
        picture: its grid, with all channels and slices.
        options: `maps` is how many maps are shown, `channels` which ones.

    Raises:
        LayoutError: it has none of these channels.
    """
    stats = picture.stats
    slices = picture.slices[0]
    # of a clip or a volume the slice in the middle stands for the map
    maps = picture.tiles[:][slices // 2 :: slices]
    channels = _telling_channels(picture, maps, options)
    return ShownLayer(
        layer=site.layer.name,
        type=site.layer.type,
        index=site.layer.index,
        call=site.call,
        calls=1,  # `_shown_layers` counts them, when the pass has ended
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
    """The channels that are shown, the most telling one first, or those of
    `--channels`.

    Args:
        maps: levels of one slice of each channel, uint8 [C, H, W].
    """
    stats = picture.stats
    if options.channels is not None:
        means = stats[:, values.MEAN]
        candidates = range(len(stats))
        return choose_channels(options.channels, candidates, means, picture.deviations)
    channels = ranked(stats, picture.deviations)
    if picture.strip:
        return channels[: options.maps]
    return unlike(maps, channels, options.maps)


def _shown_tiles(
    picture: GridPicture, maps: Bytes, channels: Sequence[int]
) -> list[Bytes]:
    """The map of each channel with its mark, RGB [h, w, 3]; of numbers the one strip of
    all channels.

    Args:
        maps: as of `_telling_channels`.
        channels: those that are shown.
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
    """The values drawn darkest and brightest in the map of each channel, or its least
    and greatest ones where all maps share a scale; of a strip those of all numbers."""
    lows = picture.stats[:, values.MIN]
    highs = picture.stats[:, values.MAX]
    if picture.limits.shared is None:
        # the slices of a channel share its limits
        slices = picture.slices[0]
        lows = picture.limits.low[::slices]
        highs = picture.limits.high[::slices]
    if picture.strip:
        # fmin and fmax leave out NaN, of what has no finite value
        return [_finite_span(np.fmin.reduce(lows), np.fmax.reduce(highs))]
    return [_finite_span(lows[channel], highs[channel]) for channel in channels]


def _finite_span(low: np.float32, high: np.float32) -> Span:
    """A range, with None in place of NaN and infinity."""
    return finite(float(low)), finite(float(high))


def ranked(stats: Floats, deviations: Floats) -> list[int]:
    """Order channels by how much their maps vary, or by the mean where all maps are
    constant, the largest first.

    Constant maps are left out where others are. Those without a finite value come last,
    and equal ones in their order.

    Args:
        stats: of the channels, [C, 6].
        deviations: without the border that padding makes, [C].
    """
    constant = values.is_constant(stats)
    strength = stats[:, values.MEAN] if constant.all() else deviations
    keys = np.nan_to_num(-strength, nan=np.inf)
    order = [int(channel) for channel in np.argsort(keys, kind="stable")]
    return [channel for channel in order if not constant[channel]] or order


def unlike(maps: Bytes, order: Sequence[int], count: int) -> list[int]:
    """The first channels of an order of which no two look alike, and none is blank.

    Args:
        maps: levels, uint8 [C, H, W].
        order: channels, the most telling one first.
        count: how many are chosen; where there are fewer that are unlike, the others
            follow in their order.
    """
    # Thinned out: maps that look alike do so at 64 pixels, too.
    step = max(1, max(maps.shape[1:]) // _COMPARED_SIDE)
    chosen: list[int] = []
    alike: list[int] = []
    rows = np.empty((0, maps[0, ::step, ::step].size), np.float32)
    for channel in order:
        # of centred rows of length 1 the product is the correlation
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
    # the strip of numbers has no room for titles: the largest are named above it
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
    """The lines below a layer's name: its type and shape, and what is particular."""
    lines = [layer.type, by(layer.shape)]
    if layer.slice is not None:
        lines.append(f"middle of {layer.slice[1]} slices")
    # a map of one pixel has no range of its own: in its own scale each would be grey
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
    """`2 of 16 all zero: 1, 9`, broken where the column of names ends. The layer has a
    constant map."""
    zeros = len(layer.all_zero)
    adjective = "all zero" if zeros == layer.constant else "constant"
    line = f"{layer.constant} of {layer.maps} {adjective}"
    # where all maps are zero, their numbers say nothing
    if 0 < zeros < layer.maps:
        named = ranges(layer.all_zero, _NAMED_ZEROS, comma=", ")
        line += f": {named}" if zeros == layer.constant else f", zero: {named}"
    return wrap(line, _LINE_LETTERS)


def _span(span: Span) -> str:
    """`0.013 … 1.2`, or `≈0.013` where both ends are written alike."""
    low, high = span
    if low is None or high is None:
        return ""
    first, last = _brief(low), _brief(high)
    if first != last:
        return f"{first} … {last}"
    return first if low == high else f"≈{first}"


def _brief(value: float) -> str:
    """A number in a few letters, as 0.013, 1.2, 350, 2e-6: with a power of ten below
    0.01 and from 100000 on."""
    if value == 0 or 0.01 <= abs(value) < 1e5:
        return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"
    base, _, power = f"{value:.1e}".partition("e")
    return f"{float(base):g}e{int(power)}"
