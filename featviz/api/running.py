"""`featviz.run`, and the functions that read runs: `diff`, `report` and `sheet`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs
from torch import nn

from featviz.api.keywords import (
    Layers,
    Model,
    Pictures,
    Request,
    in_one_process,
    keywords_of,
    read_request,
    selectors,
)
from featviz.diff import diff as diff_runs
from featviz.diff.comparison import Comparison
from featviz.diff.runs import model_runs
from featviz.errors import UsageError
from featviz.files import check_exists
from featviz.files.urls import Url, is_url
from featviz.gradients.targets import for_drawing
from featviz.options import (
    ModelOptions,
    RunOptions,
    declared_options,
    every_option,
    no_option,
    read,
    read_from,
)
from featviz.options.commands import (
    DiffFiles,
    DiffModels,
    DiffThresholds,
    ReportOptions,
    SheetOptions,
)
from featviz.report import ReportResult, build_report
from featviz.report.comparison_page import render_comparison
from featviz.run import run as pipeline
from featviz.run.results import ImageResult, RunResult
from featviz.sheets.sheets import Sheet, make_sheet


@keywords_of(RunOptions, ModelOptions)
def run(
    model: Model,
    images: Pictures,
    layers: Layers | None = None,
    out: str | Path | None = None,
    **options: Any,
) -> RunResult:
    """Draw the feature maps of images, like the command `featviz run`.

    Args:
        model: a MODEL string (`"resnet18"`, a file), or a module, which is left as it
            was.
        images: files, folders or globs; PIL images; arrays [H, W] or [H, W, C]; tensors
            [H, W], [C, H, W] or [N, C, H, W]; or a list of these. An array or tensor is
            an image before any preprocessing: uint8, or floats in 0..1, which are
            rounded to 8 bits (as by `torchvision.transforms.functional.to_pil_image`).
            Images in memory are called `image-0.png`, `image-1.png`, ... in the run. A
            tensor [F] or [1, F] is a vector, which the model gets as it is. In place of
            images, a mapping has tensors by the names of forward's arguments.
        layers: selectors; a class of modules (`torch.nn.Conv2d`); or a list of these.
            None takes one layer for each stage.
        out: the run directory. For a URL (`"s3://bucket/maps"`) it is the folder `maps`,
            which is copied there. With None the pictures are in a temporary folder, which
            is removed when neither the result nor one of its captures is in use.
        options: those below. `transform` may be a function from a PIL image to a tensor
            [C, H, W] or to a dict of tensors, and `forward_args` a mapping, both by
            forward's arguments.

    Returns:
        A record with `images`. The pictures of an image are read when they are asked for.
        If an image failed, its `error` says why.

    Example:
        >>> import featviz, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> result = featviz.run(model, torch.rand(3, 16, 16), "Conv2d", size=16, tensors=True)
        >>> result
        <RunResult of 1 image: 1 picture>
        >>> maps = result.captures[0]
        >>> maps
        <FeatureMaps of 0 (Conv2d) output: 4 maps, 1×4×14×14>
        >>> maps.image.mode, maps.tensor.shape, maps.stats["mean"].shape
        ('L', torch.Size([1, 4, 14, 14]), (4,))
    """
    for name in ("overwrite", "resume"):
        if options.get(name) is True and out is None:
            raise UsageError(
                f"{name} is for a run directory, and there is no out", "out='maps'"
            )
    request = read_run_request(model, options, layers, out)
    done = []

    def keep(image: ImageResult, total: int) -> None:
        # without the rows, which the manifests have, too: the rows of 10,000 images would
        # fill the memory
        done.append(replace(image, rows=(), temporary=request.temporary))

    result = request.call(partial(pipeline.run, progress=keep), images)
    return replace(result, images=tuple(done), temporary=request.temporary)


def read_run_request(
    model: Any, options: Mapping[str, Any], layers: Any, out: Any
) -> Request[RunOptions]:
    """Read the arguments of `run`.

    Args:
        model: a module, or a MODEL string.
        options: further keywords by name. `seed` is for the random weights of a MODEL
            string, and for the noise of `edit`. With a module it is refused, unless `edit`
            adds noise.
        layers: selectors, as the user gave them.
        out: the run directory; None makes a temporary one.

    Raises:
        UsageError: an option does not take its value, or does not exist, or `model` is
            neither a module nor a MODEL string.
    """
    keywords = in_one_process(model, options)
    seed = declared_options(ModelOptions)["seed"].value(keywords.get("seed", 0))
    if isinstance(model, nn.Module) and ":noise=" in str(keywords.get("edit")):
        keywords.pop("seed", None)
    request = read_request(RunOptions, model, keywords, layers, name="run", out=out)
    run_options = request.options
    passes = for_drawing(run_options.passes, run_options.draw, seed)
    return replace(request, options=structs.replace(run_options, passes=passes))


@keywords_of(DiffThresholds, DiffFiles, DiffModels, ModelOptions)
def diff(
    base: Model | RunResult,
    new: Model | RunResult,
    images: Pictures | None = None,
    layers: Layers | None = None,
    **options: Any,
) -> Comparison:
    """Compare two runs, or two models on the same images, layer by layer.

    Args:
        base, new: run directories or their URLs (`"s3://bucket/maps"`), or results of
            `featviz.run`; with `images` two models, as for `featviz.run`.
        images, layers: as for `featviz.run`. Both models are run on these images with
            `tensors=True`. The runs are kept below `out`, or beside the page of `html`.
        options: those below.

    Returns:
        A record with `document` (what `--json` prints), `equal`, `ratio`, `first` (the
        first layer that differs), `layers`, each with its `sqnr` and `cosine`, and
        `gates`.

    Example:
        >>> import featviz, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> before = featviz.run(model, torch.ones(3, 8, 8), size=8)
        >>> featviz.diff(before, featviz.run(model, torch.ones(3, 8, 8), size=8)).equal
        True
        >>> other = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> featviz.diff(model, other, torch.ones(3, 8, 8), size=8).first.label
        '0'
    """
    # `read_from` removes the keywords of each record; those that are left are for `run`
    keywords = dict(options)
    thresholds = read_from(DiffThresholds, keywords)
    files = read_from(DiffFiles, keywords)
    if images is None:
        if keywords or layers is not None:
            options_of_runs = every_option(DiffThresholds, DiffFiles)
            error = no_option(keywords or ["layers"], options_of_runs)
            raise UsageError(f"{error.message} of two runs; models need images")
        runs = _run_of(base), _run_of(new)
        return diff_runs(*runs, thresholds, files, render_comparison)
    titles = []
    # with tensors: the levels of pictures are rounded, and give no SQNR
    with model_runs(files) as folders:
        for model, folder in ((base, folders.base), (new, folders.new)):
            if isinstance(model, RunResult):
                raise UsageError(f"{model!r} is a run", "leave the images out")
            run(
                model,
                images,
                layers,
                folder,
                overwrite=files.overwrite,
                tensors=True,
                **keywords,
            )
            titles.append(
                type(model).__name__ if isinstance(model, nn.Module) else str(model)
            )
        return diff_runs(
            folders.base,
            folders.new,
            thresholds,
            folders.files,
            render_comparison,
            titles=(titles[0], titles[1]),
        )


@keywords_of(ReportOptions)
def report(
    run: str | Path | RunResult, out: str | Path | None = None, **options: Any
) -> ReportResult:
    """Write an HTML report of a run: the network as a picture, its images, layers and
    channels; or one page of an audit or of kernels.

    Args:
        run: a run directory, or its URL, which needs `out` and `single_file` or `zip`; a
            result of `featviz.run`; or the folder of an audit or of kernels.
        out: the folder of the report, or its file with `single_file` or `zip`. None is
            `report`, `report.html` or `report.zip` in the run directory.
        options: those below; `compare` may be a result of `featviz.run`.

    Returns:
        A record with `page`, `files` and `incomplete`.

    Example:
        >>> import featviz, tempfile, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> result = featviz.run(model, torch.rand(3, 8, 8), size=8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     featviz.report(result, f"{folder}/a.html", single_file=True).page.name
        'a.html'
    """
    base = options.get("compare")
    holds_pictures = out is not None and bool(options.get("single_file"))
    for result in (run, base):
        if isinstance(result, RunResult) and result.out is None and not holds_pictures:
            raise UsageError(
                "the pictures of a run without out are gone with it, and the report"
                " would show none",
                "give the run an out, or the report out='maps.html', single_file=True",
            )
    # a report is made only from run directories
    keywords = {
        **options,
        "out": out,
        "compare": None if base is None else _run_of(base),
    }
    settings = read(ReportOptions, keywords)
    for path in (settings.kernels, settings.exemplars, settings.audit):
        if path is not None:
            check_exists(path)
    return build_report(_run_of(run), settings)


@keywords_of(SheetOptions)
def sheet(
    runs: str | Path | RunResult | Sequence[str | Path | RunResult],
    layers: Layers | None = None,
    images: str | Sequence[str] = (),
    channels: str | int | Sequence[int] | None = None,
    out: str | Path | None = None,
    **options: Any,
) -> Sheet:
    """Draw a figure of runs, or an animation, like the command `featviz sheet`.

    Args:
        runs: one run or a list of runs: run directories or their URLs, or results of
            `featviz.run`. The folder of a `featviz.Watcher` stands for the runs of its
            steps.
        layers: selectors, a class of modules, or a list of these.
        images: names or globs; all images if it is empty.
        channels: `"12,40-43"`, `"varied:8"`, or numbers.
        out: the file. None writes none.
        options: those below.

    Returns:
        A record with `image` (the figure, or the first frame), `channels` by layer,
        `images`, `frames` and `path`.

    Example:
        >>> import featviz, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> result = featviz.run(model, torch.rand(2, 3, 8, 8), "ReLU", size=8)
        >>> featviz.sheet(result, channels=[0, 2]).channels
        {'1': [0, 2]}
    """
    several = runs if isinstance(runs, (list, tuple)) else [runs]
    keywords = {
        **options,
        "layers": selectors(layers),
        "images": images,
        "channels": channels,
        "out": out,
    }
    sources = [_run_of(run) for run in several]
    return make_sheet(sources, read(SheetOptions, keywords))


def _run_of(run: Any) -> Path | Url:
    """The run directory of an argument, or its URL.

    Args:
        run: a path, a URL, or a result of `featviz.run`.

    Raises:
        UsageError: the argument is anything else, or the path does not exist.
    """
    if isinstance(run, RunResult):
        return run.root
    if isinstance(run, str) and is_url(run):
        return Url.of_run(run)
    if isinstance(run, (str, Path)):
        check_exists(Path(run))
        return Path(run)
    raise UsageError(
        f"{type(run).__name__!r} is no run", "a run directory, or featviz.run(...)"
    )
