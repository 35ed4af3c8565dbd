"""Prepares a run: loads the model, groups the images and chooses the layers. `run
--dry-run`, audits and exemplars use it, too."""

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
"""The warnings, by the preset that is guessed."""

LOOPS = "featviz.drawing.deflate"
"""The module whose import also imports numba and the compiled loops, which takes long."""


Show = Callable[
    [Sequence[Tensor], HintBook, Callable[..., None]], tuple[Outcome, Recorder]
]
"""Runs the model on one input. Takes the arguments of the model's forward, hints on
layouts, and a function that gets each captured tensor. Returns the outcome of the pass and
the recorder of the hooks."""


@dataclass(frozen=True)
class ModelInput:
    """An image as the model gets it."""

    images: tuple[Image.Image | Raster, ...]
    """The decoded images: one, the frames of a clip, or one for each input of the model."""
    sha256: str
    """The checksum of the image's files."""
    args: list[Tensor]
    """The arguments of forward, [1, C, H, W] each (or [1, C, T, H, W]), on the CPU."""
    preprocess: Preprocess
    words: str
    """The preprocessing in words, as the manifest has it."""
    window: Window | None
    """Where the image lies in a padded input; None for an input without padding."""

    def background(self) -> list[Bytes]:
        """The pictures for --overlay, uint8 [H, W, 3] each: the first image that the
        model saw, or all frames of a clip.

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
        """Where the whole image of the file lies in the input, in pixels of the input. If
        the image was cropped, this window reaches beyond the input."""
        height, width = self.args[0].shape[-2:]
        if self.preprocess.transform is not None:
            return Window(0, 0, height, width)
        return self.preprocess.chain.window_in_input(
            self.images[0].size, (height, width)
        )

    def in_file(self, detections: Sequence[Detection]) -> tuple[Detection, ...]:
        """Convert boxes to pixels of the file's image, and cut them at its edges.

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
    """A run that is ready for its first image."""

    options: RunOptions
    model: LoadedModel
    samples: tuple[Sample, ...]
    """The images of the whole run, all shards included."""
    blank: list[Tensor]
    """Zeros in the shapes of the first image's inputs."""
    image_size: tuple[int, int]
    """Height and width in pixels of the first image in the first input, without padding."""
    layers: list[Layer]
    plan: PassPlan
    books: dict[tuple[int, ...], HintBook] = field(default_factory=dict)
    """Hints on layouts, by the shape of the first input; `hints` fills it. All steps of a
    series share one dict."""

    def hints(self, args: Sequence[Tensor]) -> HintBook:
        """Hints on the layout of each layer's tensors, for inputs of this shape."""
        shape = tuple(args[0].shape)
        if shape not in self.books:
            book = HintBook(self.model.module, shape, self.options.draw.tensor_layout)
            # People compare the pictures of a run, so layouts that one input settled hold
            # for all shapes. Only inputs of the first image's shape settle their own,
            # also if a resumed run begins with another image: receptive fields are
            # followed only in them.
            if self.books and shape != self.blank[0].shape:
                book.settle_as(next(iter(self.books.values())))
            self.books[shape] = book
        return self.books[shape]

    @contextmanager
    def watched(self, layers: Sequence[Layer] | None = None) -> Iterator[Show]:
        """Put the model into eval mode, and hooks on its layers, while the block shows
        any number of images.

        Args:
            layers: the layers to capture; None captures those of the run.

        Yields:
            A function that shows an image. It hands each captured tensor to a sink: the
            site, the tensor and, for class activation maps, the gradient at the tensor.
        """
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
                    """Show an image, and follow attention through the layers."""
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
    """The files that images and a model are read from. No result may be written there."""
    # A dict keeps each file once, in order: thousands of images may be in one archive.
    files: dict[Path, None] = {}
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
        images: the samples from `find_images`.

    Raises:
        FeatvizError: the model cannot be loaded or fails, the first image cannot be
            read, or an option does not fit the model.
    """
    # numba is loaded while the model is
    Thread(
        target=import_module, args=(LOOPS,), name="featviz-loops", daemon=True
    ).start()
    loaded = choose_preprocessing(load_model(model, options.inputs), images)
    # after the model: it decides whether files are images, clips or pairs
    samples = group_samples(images, loaded.preprocess, options.inputs.frames)
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


def choose_preprocessing(loaded: LoadedModel, samples: Sequence[Sample]) -> LoadedModel:
    """The model with the preprocessing of a run. This is the model's own; but if the first
    layer is linear, and the first file holds a vector of as many numbers as the layer
    takes, vectors go in as they are. Warns if the preprocessing is a guess.

    Raises:
        LoadError: a tensor of the module has no values (it is on the device meta).
    """
    refuse_meta(loaded.module)
    preprocess = loaded.preprocess
    # The file decides: a model with a linear first layer may also take images, which its
    # own code flattens.
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
    """Check the options, and find the images. `--input` counts as one image without a
    file, with the name of its first tensor.

    Args:
        images: files, folders, archives, URLs or globs, as on the command line.

    Raises:
        UsageError: an option is bad, `--input` is given together with images or with a
            transform, or no image is found.
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


def group_samples(
    samples: Sequence[Sample], preprocess: Preprocess, frames: int | None
) -> list[Sample]:
    """Put files together as the model takes them: as single images, as clips, or as
    groups of one image for each input.

    Args:
        samples: the samples from `find_images`, with one file each.
        frames: how many frames of a video are drawn, for a model of single images; None
            takes only the first frame.
    """
    # a model of single images takes the frames of a video one by one
    if preprocess.frames is None and preprocess.inputs == 1 and frames is not None:
        samples = find.split_videos(samples, frames)
    if preprocess.frames is not None:
        samples = find.join_clips(samples)
    elif preprocess.inputs > 1:
        samples = find.join_groups(samples, preprocess.inputs)
    return find.rename_nested(samples)


def read_input(
    sample: Sample, preprocess: Preprocess, inputs: InputOptions, quiet: bool = False
) -> ModelInput:
    """Decode a sample and preprocess it.

    Args:
        quiet: suppress warnings, such as of frames that are left out.

    Raises:
        ImageError: a file cannot be read, or the model does not take its content.
    """
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
    """Make blank inputs of the model.

    Returns:
        Zeros, a tensor for each input of the model, in the shapes that the first readable
        sample gives; if no sample can be read, in those of the preprocessing. And the
        height and width in pixels of the image in the first input, without padding.
    """
    preprocess = loaded.preprocess
    blank = preprocess.blank()
    window = None
    # for any other preprocessing, all inputs have one size, and no file need be read
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
    """Refuse bad options of a run before any work.

    Raises:
        UsageError: an option is bad, or two options contradict each other.
    """
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
    """Refuse bad drawing options of `run`, `grid` or `kernels`.

    Args:
        board: the folder for TensorBoard's events; None writes no events.

    Raises:
        UsageError: an option is bad, or the library that it needs (matplotlib,
            TensorBoard) is not installed.
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
