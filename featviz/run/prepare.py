"""What `run` and `--dry-run` do before any image goes through the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from threading import Thread

import torch
from PIL import Image
from torch import Tensor

from featviz.drawing import colormap, normalize, tensorboard, values
from featviz.drawing.picture import check_format
from featviz.errors import OF_THE_START, ImageError, UsageError
from featviz.gradients import passes
from featviz.gradients import targets as gradients
from featviz.gradients.attention import AttentionPath, attended, with_attention
from featviz.gradients.passes import PassPlan
from featviz.hooks import selectors
from featviz.hooks.capture import Recorder
from featviz.hooks.eval_mode import in_eval_mode
from featviz.images import decode, find
from featviz.images.arrays import ExpectedImage
from featviz.layout.tracing.guess import parse_override
from featviz.layout.tracing.hints import HintBook
from featviz.models.arguments import UserTransform
from featviz.models.load import LoadedModel, load_model, refuse_meta
from featviz.models.preprocess import Preprocess, Window
from featviz.models.presets import first_features
from featviz.models.requirements import require_matplotlib
from featviz.models.weights import read_saved_tensor
from featviz.options import DrawOptions, InputOptions, ModelOptions, RunOptions
from featviz.options.commands import AuditOptions, ExemplarOptions
from featviz.records import Bytes, Detection, Layer, Outcome, Raster, Sample
from featviz.run.choose import choose_layers
from featviz.rundir.place import model_files
from featviz.text import quoted

log = logging.getLogger(__name__)

_GUESSES = {
    "imagenet": "preprocessing is a guess, --preset imagenet; --preset none, --size,"
    " --mean and --std change it",
    "none": "preprocessing is a guess, --preset none: values are not normalised; --mean"
    " and --std change it",
}
"""Warnings, by the preset that is taken."""

LOOPS = "featviz.drawing.deflate"
"""The module whose import brings numba and its compiled loops."""


Show = Callable[
    [Sequence[Tensor], HintBook, Callable[..., None]], tuple[Outcome, Recorder]
]
"""Shows an input to a model: takes the arguments of its forward, hints on layouts, and a
sink of tensors; returns what the model said, and the recorder of its hooks."""


@dataclass(frozen=True)
class ModelInput:
    """An image as the model gets it."""

    images: tuple[Image.Image | Raster, ...]
    """As decoded: one, the frames of a clip, or one for each input of the model."""
    sha256: str
    """The checksum of its files."""
    args: list[Tensor]
    """The arguments of forward, [1, C, H, W] each (or [1, C, T, H, W]), on the CPU."""
    preprocess: Preprocess
    words: str
    """The preprocessing in words, as the manifest has it."""
    window: Window | None
    """Where the image lies in an input that was padded; None where nothing is padded.
    """

    def background(self) -> list[Bytes]:
        """What maps may lie over, uint8 [H, W, 3] each: the first picture that the
        model saw, or the frames of a clip.

        Raises:
            UsageError: the input is not an image.
        """
        if getattr(self.preprocess.transform, "blank", None) is not None:
            raise UsageError(
                "maps of an input that is no image lie over nothing", "no --overlay"
            )
        pictures = self.preprocess.pictures(self.args)
        if not self.preprocess.frames:
            pictures = pictures[:1]
        return [values.to_rgb(picture[0]) for picture in pictures]

    @property
    def placement(self) -> Window:
        """Where all of the file's image lies in the input, in pixels; beyond the edges
        of the input where it was cropped."""
        height, width = self.args[0].shape[-2:]
        if self.preprocess.transform is not None:
            return Window(0, 0, height, width)
        return self.preprocess.chain.placed(self.images[0].size, (height, width))

    def in_file(self, detections: Sequence[Detection]) -> tuple[Detection, ...]:
        """Boxes in pixels of the file's image, and not beyond its edges.

        Args:
            detections: boxes in pixels of the model's input.
        """
        size = self.images[0].size
        window = self.placement
        across = size[0] / window.width
        down = size[1] / window.height
        in_file = []
        for detection in detections:
            left, top, right, bottom = detection.box
            box = (
                max((left - window.left) * across, 0),
                max((top - window.top) * down, 0),
                min((right - window.left) * across, size[0]),
                min((bottom - window.top) * down, size[1]),
            )
            in_file.append(replace(detection, box=box))
        return tuple(in_file)


@dataclass(frozen=True)
class Prepared:
    """All that is known of a run before the first image."""

    options: RunOptions
    model: LoadedModel
    samples: tuple[Sample, ...]
    """Those of the whole run, whichever shard takes them."""
    blank: list[Tensor]
    """Zeros in the shapes of the first image's inputs."""
    image_size: tuple[int, int]
    """Height and width in pixels of the image in the first input, without padding."""
    layers: list[Layer]
    plan: PassPlan
    books: dict[tuple[int, ...], HintBook] = field(default_factory=dict)
    """Hints on layouts, by shape of the input; a series has the same for all of its
    steps."""

    def hints(self, args: Sequence[Tensor]) -> HintBook:
        """Hints on the layout of each layer's tensors, for inputs of this shape."""
        shape = tuple(args[0].shape)
        if shape not in self.books:
            book = HintBook(self.model.module, shape, self.options.draw.tensor_layout)
            # A layout that one input settled holds for all: pictures of a run are
            # compared with each other. Inputs of the first image's shape settle their
            # own, even where a resumed run begins with another image: in them receptive
            # fields are followed.
            if self.books and shape != self.blank[0].shape:
                book.settle_as(next(iter(self.books.values())))
            self.books[shape] = book
        return self.books[shape]

    @contextmanager
    def watched(self, layers: Sequence[Layer] | None = None) -> Iterator[Show]:
        """Put the model into eval mode and its hooks in place, on these layers or those
        of the run, for any number of images. The sink takes the site and the tensor of
        each capture, and the gradient at the tensor where class activation maps are
        drawn."""
        layers = self.layers if layers is None else layers
        with (
            in_eval_mode(self.model.module, self.plan.backward),
            passes.watched(self.model, self.plan, layers) as hooks,
        ):
            draw = self.options.draw
            if draw.attends:
                path = AttentionPath()

                def attend(
                    args: Sequence[Tensor], book: HintBook, take: Callable[..., None]
                ) -> tuple[Outcome, Recorder]:
                    sink = with_attention(path, book, str(draw.reduce), take)
                    with attended(path):
                        return hooks.show(args, book, sink)

                yield attend
            elif draw.weighs:
                yield lambda args, book, sink: hooks.show(
                    args, book, passes.paired(sink)
                )
            else:
                yield hooks.show


def files_read(
    model: ModelOptions | LoadedModel, samples: Iterable[Sample] = ()
) -> list[Path]:
    """The files that images and a model are read from: nothing may be written there."""
    # thousands of images may be in one archive
    files: dict[Path, None] = {}  # in their order, each once
    for sample in samples:
        for path in sample.paths:
            inside_archive = decode.split_member(path)
            file = inside_archive[0] if inside_archive else path
            if isinstance(file, Path):
                files[file] = None
    if isinstance(model, LoadedModel):
        return [*files]
    return [*files, *model_files(model.spec, model.arch, model.weights)]


def prepare(
    model: ModelOptions | LoadedModel, images: Sequence[Sample], options: RunOptions
) -> Prepared:
    """Load the model, group the images as it takes them (clips, pairs), and choose the
    layers.

    Args:
        images: as `find_images` has found them.

    Raises:
        FeatvizError: the model cannot be loaded or fails, the first image cannot be
            read, or an option does not fit the model.
    """
    # numba is loaded while the model is
    Thread(
        target=import_module, args=(LOOPS,), name="featviz-loops", daemon=True
    ).start()
    loaded = fitted(load_model(model, options.inputs), images)
    # after the model: it decides whether files are images, clips or pairs
    samples = grouped(images, loaded.preprocess, options.inputs.frames)
    blank, image_size = blank_input(loaded, samples, options.inputs)
    layers = choose_layers(loaded, options.layers, blank, options.draw.tensor_layout)
    for text in options.draw.tensor_layout:
        chosen = parse_override(text).selectors or ()
        option = f"--tensor-layout {quoted(repr(text))}"
        selectors.warn_of_unmatched(layers, chosen, "layer drawn", option)
    book = HintBook(loaded.module, blank[0].shape, options.draw.tensor_layout)
    passes.check_names(loaded, blank)
    plan = passes.plan(loaded, options.passes, blank, book)
    return Prepared(options, loaded, tuple(samples), blank, image_size, layers, plan)


def fitted(loaded: LoadedModel, samples: Sequence[Sample]) -> LoadedModel:
    """The model with the preprocessing of a run: of vectors, where its first layer is
    linear and the first file holds as many numbers; else as it is. Warns where neither
    the model nor the user says how images go in.

    Raises:
        LoadError: a tensor of the module has no values (it is on the device meta).
    """
    refuse_meta(loaded.module)
    preprocess = loaded.preprocess
    # an MLP of flattened digits takes images as well, which its own code flattens
    features = None
    if preprocess.transform is None:
        features = first_features(loaded.module)
    if features is not None and _holds_vector(samples[0], features):
        vector = UserTransform.vector(features).preprocess(3)
        preprocess = replace(vector, dtype=preprocess.dtype)
    if preprocess.guessed is not None:
        log.warning(_GUESSES[preprocess.guessed], extra=OF_THE_START)
    return replace(loaded, preprocess=preprocess)


def _holds_vector(sample: Sample, features: int) -> bool:
    """Whether the file of a sample holds a vector of `features` numbers, [features] or
    [1, features]. False for a file that cannot be read."""
    # a file that cannot be read is reported when the run comes to it
    with suppress(ImageError):
        raw = ExpectedImage(0, raw=True)
        (image,), _ = decode.decode(
            sample, "white", 1, raw, read_saved_tensor, quiet=True
        )
        return isinstance(image, Raster) and image.values.shape in (
            (features,),
            (1, features),
        )
    return False


def find_images(
    images: Sequence[str], options: RunOptions | AuditOptions | ExemplarOptions
) -> list[Sample]:
    """Check the options and find the images. `--input` counts as one image without a
    file, by the name of its first tensor.

    Raises:
        UsageError: an option is bad, `--input` stands beside images or a transform, or
            no image is found.
    """
    inputs = options.inputs
    outside = options.out
    if isinstance(options, RunOptions):
        check_options(options)
        outside = options.folder
    else:
        decode.check_background(inputs.background)
    if not inputs.input:
        return find.find_samples(images, options.nul_separated, outside)
    if images or inputs.transform is not None:
        surplus = "a transform prepares one" if inputs.transform else "there are images"
        raise UsageError(
            f"input takes the place of an image, and {surplus}", "one of the two"
        )
    return [Sample(inputs.input[0].partition("=")[0], ())]


def grouped(
    samples: Sequence[Sample], preprocess: Preprocess, frames: int | None
) -> list[Sample]:
    """Samples as the model takes them: images, clips, or several images at once.

    Args:
        samples: of one file each, as from `find_images`.
        frames: how many images are taken of a video, for a model of single images; None
            takes the first frame.
    """
    # an image model takes frames of a video one by one
    if preprocess.frames is None and preprocess.inputs == 1 and frames is not None:
        samples = find.stills(samples, frames)
    if preprocess.frames is not None:
        samples = find.clips(samples)
    elif preprocess.inputs > 1:
        samples = find.in_groups(samples, preprocess.inputs)
    return find.rename_nested(samples)


def read_input(
    sample: Sample, preprocess: Preprocess, inputs: InputOptions, quiet: bool = False
) -> ModelInput:
    """Decode a sample and preprocess it.

    Args:
        quiet: warn of nothing, such as frames that are left out.

    Raises:
        ImageError: a file cannot be read, or the model does not take what it holds.
    """
    # decode is told what the model takes: channels, frames, or the file's own numbers
    chain = preprocess.chain
    frames = preprocess.frames
    expected = ExpectedImage(
        chain.channels, frames is not None, preprocess.transform is not None
    )
    images, sha256 = decode.decode(
        sample, inputs.background, frames, expected, read_saved_tensor, quiet
    )
    if not sample.paths:  # --input
        images = (preprocess.empty(),)
    if any(isinstance(image, Raster) and image.narrow_range for image in images):
        preprocess = replace(preprocess, stretched=True)
    return ModelInput(
        images=images,
        sha256=sha256,
        args=preprocess(images),
        preprocess=preprocess,
        words=preprocess.words_for(images),
        window=chain.window(images[0].size) if chain.stride else None,
    )


def blank_input(
    loaded: LoadedModel, samples: Sequence[Sample], inputs: InputOptions
) -> tuple[list[Tensor], tuple[int, int]]:
    """Zeros in the shapes of the first readable sample's inputs, and the height and
    width in pixels that the image has in the first of them, without padding. Where no
    sample can be read, the shapes are those that the preprocessing itself says."""
    preprocess = loaded.preprocess
    blank = preprocess.blank()
    window = None
    # else all inputs have the same size, and no file need be read
    if preprocess.chain.own_size or preprocess.frames is not None:
        for sample in samples:
            with suppress(ImageError):
                image = read_input(sample, preprocess, inputs, quiet=True)
                window = image.window
                blank = [torch.zeros_like(arg) for arg in image.args]
                break
    if window is not None:
        return blank, window[2:]
    height, width = (1, 1, *blank[0].shape)[-2:]  # a vector has no height
    return blank, (height, width)


# What the options mean together


def check_options(options: RunOptions) -> None:
    """Refuse bad options of a run before any work."""
    # contradictions first, which need no look at any file
    if options.resume and options.overwrite:
        raise UsageError(
            "resume and overwrite exclude each other",
            "give one of them",
            options=("resume", "overwrite"),
        )
    if options.overwrite and options.shard is not None:
        raise UsageError(
            "overwrite would remove what other shards write, not only shard"
            f" {options.shard}",
            "remove the run there first, or name another place with --out",
            options=("overwrite",),
        )
    check_drawing(options.draw, options.tensorboard)
    decode.check_background(options.inputs.background)
    gradients.check_options(options.passes, options.draw)


def check_drawing(draw: DrawOptions, board: Path | None = None) -> None:
    """Refuse bad drawing options, those of `grid` and `kernels` as well.

    Args:
        board: the folder for TensorBoard's events; None where none are written.

    Raises:
        UsageError: an option is bad, or what it needs (matplotlib, TensorBoard) is not
            installed.
    """
    draw.check()
    for text in draw.tensor_layout:
        parse_override(text)
    colormap.check_cmap(draw.cmap)
    normalize.parse_scale(draw.normalize)
    check_format(draw.format)
    if draw.figure:
        require_matplotlib()
    if board is not None:
        tensorboard.check_installed()
