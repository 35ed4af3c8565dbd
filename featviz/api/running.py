"""`featviz.run`: the feature maps of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from featviz import pipeline
from featviz.api.keywords import Layers, Model, Picture, RunKeywords
from featviz.api.lending import Feeding, Room, as_files, lent, selectors
from featviz.api.results import Run, RunImage
from featviz.api.words import keyword_errors
from featviz.errors import UsageError
from featviz.models.load import LoadedModel, ModelOptions
from featviz.pipeline.keywords import names_of, read_keywords, take
from featviz.pipeline.options import RunOptions, at_place
from featviz.records import ImageResult


@keyword_errors()
def run(
    model: Model,
    images: Picture | list[Picture] | tuple[Picture, ...],
    layers: Layers | None = None,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    resume: bool = False,
    tensorboard: str | Path | None = None,
    **options: Unpack[RunKeywords],
) -> Run:
    """Draw the feature maps of images, like the command `featviz run`.

    Args:
        model: a MODEL string (`"resnet18"`, a file, `"file.py:factory"`), or a module, which is
            given back as it was.
        images: files, folders or globs; PIL images; arrays [H, W] or [H, W, C]; tensors [H, W],
            [C, H, W] or [N, C, H, W]; or a list of these. What is in memory is an image before any
            preprocessing: uint8, or floats in 0..1, which are rounded to 8 bits (as by
            `torchvision.transforms.functional.to_pil_image`), and is called `image-0.png`,
            `image-1.png`, ... in the run.
        layers: selectors; a class of modules (`torch.nn.Conv2d`); or a list of these. None takes
            one layer for each stage.
        out: the run directory, or a URL of an object store (`"s3://bucket/maps"`). None leaves
            nothing behind: the pictures are in a temporary folder for as long as the result, or one
            of its captures, is in use.
        overwrite: replace a run that is there.
        resume: go on with the same run that is there.
        tensorboard: folder for TensorBoard's runs (extra `featviz[tensorboard]`).
        options: as on the command line, with underscores. How maps are drawn: normalize, cmap,
            nrow, padding (pixels), scale, max_maps, order, collapse, labels, titles, overlay
            (0..1), reduce, figure, format, ... `tensors=True` keeps the raw tensors. The input:
            size (pixels), crop, mean, std, ..., or `transform`, a function from a PIL image to a
            tensor [C, H, W] or to a dict of tensors by the names of forward's arguments; and
            `forward_args`, further arguments of forward by name. How a MODEL string is loaded:
            weights, arch, seed, device, ... For the run: archive, wait (seconds), verify,
            prune, durable, fail_fast, jobs, step, shard, max_output_size (bytes, or `"2GB"`),
            max_files. What goes in and what flows back:
            capture (`"output,grad"`, or a sequence), target (`"class:281"`), grad_rule.
            Interventions, each a string or a sequence of them: ablate (`"layer3.*.relu:5,17"`),
            scale_channel (`"conv1:3=2.0"`), clamp (`"relu:0,6"`), noise (`"conv1:0.1"`, drawn from
            `seed`), grad_scale (`"layer4:0.5"`).

    Returns:
        The images, and what was drawn of each: pictures, numbers and tensors are read when they are
        asked for.

    Raises:
        FeatvizError: nothing could be begun, or the run directory cannot be written. What goes
            wrong with one image is in its `error`.

    Example:
        >>> import featviz, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> result = featviz.run(model, torch.rand(3, 16, 16), "Conv2d", size=16, tensors=True)
        >>> result
        <Run of 1 image: 1 picture>
        >>> maps = result.captures[0]
        >>> maps
        <FeatureMaps of 0 (Conv2d) output: 4 maps, 1×4×14×14>
        >>> maps.image.mode, maps.tensor.shape, maps.stats["mean"].shape
        ('L', torch.Size([1, 4, 14, 14]), (4,))
    """
    given: dict[str, Any] = dict(options)
    _check_place(out, given.get("archive"), overwrite, resume)
    room = Room() if out is None and given.get("archive") is None else None
    place = room.path / "run" if room is not None else RunOptions.out if out is None else out
    where = at_place(place) if isinstance(place, (str, Path)) else {"out": place}
    for_run = {"layers": selectors(layers), **where, "overwrite": overwrite}
    for_run |= {"resume": resume, "tensorboard": tensorboard}
    asked, lend = read_order(model, given, for_run)
    finished: list[ImageResult] = []
    with as_files(images) as files, lend() as source:
        result = pipeline.run(source, files, asked, lambda image, total: finished.append(image))
    done = tuple(RunImage.of(image, result.out, room) for image in finished)
    return Run(result, done, room)


def read_order(
    model: Any, given: dict[str, Any], for_run: Mapping[str, Any]
) -> tuple[RunOptions, Callable[[], AbstractContextManager[ModelOptions | LoadedModel]]]:
    """The options of a run, and what lends its model, from keywords.

    Args:
        given: the keywords of `run`; emptied.
        for_run: fields of RunOptions.

    Raises:
        UsageError: a keyword that does not exist, or a bad value.
    """
    feeding = Feeding.taken(given)
    for_noise = {"seed"} if isinstance(model, nn.Module) and "noise" in given else set()
    for_model = take(given, names_of(ModelOptions) - for_noise)
    seed = given.pop("seed", for_model.get("seed", 0))
    if isinstance(given.get("tensors"), bool):
        given["tensors"] = "npy" if given["tensors"] else None
    asked = read_keywords(given, seed, for_run)
    return asked, partial(lent, model, for_model, asked.inputs, feeding)


def _check_place(out: Any, archive: Any, overwrite: bool, resume: bool) -> None:
    for name, wanted in (("overwrite", overwrite), ("resume", resume)):
        if wanted is True and out is None and archive is None:
            raise UsageError(f"{name} is for a run directory, and there is no out", "out='maps'")
