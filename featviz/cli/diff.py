"""`featviz diff`: of two runs, or of two models that it runs first."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from featviz.cli import output
from featviz.cli.options import (
    ANY_IMAGES,
    BASE,
    NEW,
    Values,
    command,
    existing_run,
    images_of,
)
from featviz.errors import UsageError
from featviz.options import ModelOptions, RunOptions, read_from
from featviz.options.commands import DiffFiles, DiffModels, DiffThresholds
from featviz.options.run import DrawOptions
from featviz.rundir import RUN_FILE
from featviz.text import quoted

if TYPE_CHECKING:
    from featviz.diff.comparison import Comparison
    from featviz.models.load import LoadedModel

log = logging.getLogger(__name__)


@command(
    DiffThresholds,
    DiffFiles,
    DiffModels,
    ModelOptions,
    arguments=[BASE, NEW, ANY_IMAGES],
)
def diff(values: Values) -> int:
    """Compare two runs, or two models on the same images, layer by layer.

    BASE and NEW are run directories. With IMAGE... or --input they are models, and
    diff first runs both on these images; --arch, --layers, --size and so on hold for
    both. One may be an .onnx file that was exported from the other.

    \b
    Examples:
      featviz diff runs/main runs/branch
      featviz diff old.pth new.pth photos/ --arch resnet18 --html diff.html
      featviz diff float.pth int8.pth photos/ --fail-on 'sqnr<20'
      featviz diff model.pth model.onnx photos/ --layers Conv2d,ReLU
      featviz diff before after --json | jq .first_divergence

    \b
    absolute   the largest |a - b|, for a value a of BASE and b of NEW
    relative   |a - b| / (max(|a|, |b|) + the layer's largest |value|), 0..1
    cosine     similarity of the layer's tensors as vectors, -1..1: 1 is alike
    SQNR       10 log10 of the power of a over that of b - a, in dB (kept tensors)
    \f
    Two values are equal if their relative difference is at most --tolerance.
    The default accepts what another number of threads or another CPU library
    changes; to compare a run on a CPU with one on a GPU, 1e-3 may be needed.
    NaN equals NaN.

    If both runs kept tensors (`featviz run --tensors npy`), diff compares the
    tensors. If not, it compares the statistics, and the pixels of PNGs. Runs of
    two models keep tensors, and go into --out. Without --out they go into a
    folder beside the page of --html, and without both into a temporary folder.
    Two runs of different images are refused, and so are two that differ in
    preprocessing or in --normalize.

    Exit codes: 0 equal, 1 failed or refused, 2 usage, 3 equal, but some images
    failed, 4 different. With --fail-on: 0 the gates held, 4 one failed.
    """
    from featviz.diff import diff as diff_runs
    from featviz.diff.gates import parse_gate
    from featviz.report.comparison_page import render_comparison

    thresholds = read_from(DiffThresholds, dict(values))
    files = read_from(DiffFiles, dict(values))
    # a misspelt gate is refused before two models run
    for text in thresholds.fail_on:
        parse_gate(text)
    images = images_of(values)
    if images or values["input"]:
        return _diff_models(values, images, thresholds, files)
    for spec in (values["base"], values["new"]):
        if Path(spec).is_file():
            raise UsageError(
                f"{quoted(spec)} is a file, and no run directory",
                "two models are compared on images: featviz diff BASE NEW IMAGE...",
            )
    base = existing_run(values["base"])
    new = existing_run(values["new"])
    result = diff_runs(base, new, thresholds, files, render_comparison)
    _print(result, files, values["json"])
    return result.exit_code


def _diff_models(
    values: Values,
    images: Sequence[str],
    thresholds: DiffThresholds,
    files: DiffFiles,
) -> int:
    """Run both models on the images, compare the runs, and print the comparison.

    Args:
        values: the values of the command line, with `base` and `new` as models.
        images: as they were typed, or as TOML has them; empty if `--input` was given in
            their place.

    Returns:
        The exit code of the comparison; 3 if that is 0, and some images failed. If a run
        fails, nothing is compared, and its exit code is returned.
    """
    from featviz.diff import diff as diff_runs
    from featviz.diff.diff import checked_files
    from featviz.diff.runs import model_runs
    from featviz.models.requirements import require_torch
    from featviz.report.comparison_page import render_comparison

    specs = [values["base"], values["new"]]
    sources = _checked_models(values, specs, images)
    with model_runs(files) as runs:
        checked_files(runs.files, (runs.base, runs.new))
        require_torch(is_command=True)
        from featviz.run.partners import run_models

        inputs = read_from(DiffModels, dict(values)).inputs
        models = run_models(sources[0], sources[1], inputs, values["layers"])
        exit_codes = []
        folders = (runs.base, runs.new)
        for spec, (model, layers), folder in zip(specs, models, folders, strict=True):
            # with tensors: the levels of pictures are rounded, and give no SQNR
            options = RunOptions(
                layers=layers,
                out=folder,
                overwrite=files.overwrite,
                draw=DrawOptions(tensors="npy"),
                inputs=inputs,
            )
            exit_codes.append(_run_model(spec, model, images, options))
            # 3 says that some images failed: the images that did not are compared
            if exit_codes[-1] not in (0, 3):
                return exit_codes[-1]
        result = diff_runs(
            runs.base,
            runs.new,
            thresholds,
            runs.files,
            render_comparison,
            titles=(values["base"], values["new"]),
        )
        _print(result, runs.files, values["json"])
        if files.out is not None or files.html is not None:
            log.info("runs in %s and %s", runs.base, runs.new)
        if values["layers"] is None and not result.equal:
            # a change shows at the end of its stage
            log.info(
                "one layer of each stage was compared; --layers '*' names the first of"
                " all that differs"
            )
    return result.exit_code or max(exit_codes)


def _checked_models(
    values: Values, specs: Sequence[str], images: Sequence[str]
) -> list[ModelOptions]:
    """The options of both models, BASE first.

    Args:
        values: the values of the command line; the options of models hold for both.
        specs: BASE and NEW, as they were typed.
        images: as they were typed.

    Raises:
        UsageError: a model is a run directory or does not exist, an image does not exist,
            or images are listed on stdin, which can be read only once.
    """
    from featviz.images.find import check_arguments
    from featviz.models.requirements import check_current_folder
    from featviz.models.sources import check_source

    for spec in specs:
        if Path(spec, RUN_FILE).is_file():
            raise UsageError(
                f"{quoted(spec)} is a run directory, and with images it has to be a"
                " model",
                "leave the images out to compare two runs",
            )
    if "-" in images:
        raise UsageError(
            "- lists images on stdin, which can be read only once", "name a folder"
        )
    # before torch is imported and models are loaded, which takes seconds
    check_current_folder()
    graphs = [spec for spec in specs if spec.endswith(".onnx")]
    sources = []
    for spec in specs:
        source = read_from(ModelOptions, dict(values), spec=spec)
        # A graph holds its own weights. If the other model is a network, these options
        # are for that.
        if graphs == [spec]:
            source = structs.replace(source, arch=None, weights=None, model_args={})
        check_source(source)
        sources.append(source)
    check_arguments(images)
    return sources


def _run_model(
    spec: str,
    model: ModelOptions | LoadedModel,
    images: Sequence[str],
    options: RunOptions,
) -> int:
    """Run one of the two models, and print what went wrong with images and layers.

    Args:
        spec: the model as it was typed, for messages.
        model: the loaded model, or the options by which it is loaded.
        images: as they were typed.
        options: the options of the run; `out` is the folder of the run.

    Returns:
        The exit code of the run.
    """
    from featviz.cli.run import RunPrinter
    from featviz.run.run import run

    with output.progress_bar() as advance:
        printer = RunPrinter(advance, title=f"{spec}: ")
        result = run(model, images, options, printer.image)
    printer.log_gaps(result)
    return result.exit_code


def _print(result: Comparison, files: DiffFiles, as_json: bool) -> None:
    """Print the comparison on stdout, and where its files are on stderr.

    Args:
        files: the paths of the page and of the JUnit file.
        as_json: whether to print the document, in place of the table.
    """
    from featviz.diff.output import diff_table

    if as_json:
        output.document(result.document)
    else:
        output.text(str(diff_table(result)))
    if files.html is not None:
        log.info("page in %s", files.html)
    if result.out is not None:
        log.info("difference maps and diff.json in %s", result.out)
    if files.junit is not None:
        log.info("verdicts in %s", files.junit)
