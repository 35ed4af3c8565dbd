"""`featviz run`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featviz.commands import options as opts
from featviz.records import DrawOptions, ImageResult, RunResult

if TYPE_CHECKING:
    from featviz.pipeline import Progress

log = logging.getLogger(__name__)

DRAW = DrawOptions()
_NAMED = 3
"""Layers without a picture that are named on stderr; the manifests have them all."""

draw_options = opts.stacked(
    [
        click.option(
            "--normalize",
            default=DRAW.normalize,
            show_default=True,
            metavar="MODE",
            help="map, layer, none, range:LO,HI, symmetric or percentile:LO,HI.",
        ),
        click.option(
            "--cmap",
            default=DRAW.cmap,
            show_default=True,
            help="grey, or a colormap of matplotlib.",
        ),
        click.option(
            "--nrow", type=opts.AutoInt(), default="auto", show_default=True, help="Maps in a row."
        ),
        click.option(
            "--padding",
            type=int,
            default=DRAW.padding,
            show_default=True,
            help="Pixels around maps.",
        ),
        click.option(
            "--pad-value",
            type=float,
            default=DRAW.pad_value,
            show_default=True,
            help="Its grey, 0..1.",
        ),
        click.option(
            "--scale",
            type=opts.AutoInt(),
            default="auto",
            show_default=True,
            help="Factor by which maps are enlarged; auto enlarges small ones.",
        ),
        click.option(
            "--min-tile",
            type=int,
            default=DRAW.min_tile,
            show_default=True,
            help="Pixels below which --scale auto enlarges a map.",
        ),
        click.option("--max-maps", type=int, help="Draw at most so many maps of a layer."),
        click.option(
            "--max-slices",
            type=int,
            default=DRAW.max_slices,
            show_default=True,
            help="Of clips and batches, draw at most so many steps or regions of each map.",
        ),
        click.option(
            "--tensor-layout",
            multiple=True,
            metavar="[SELECTORS=]LAYOUT",
            help="Instead of the guess: nchw, nhwc, tokens, tokens:14x20+1, ncl, heads, "
            "attention, vector, batch, ncthw or nthwc; repeatable.",
        ),
        click.option(
            "--pick",
            type=click.Choice(["first", "top", "spread"]),
            default=DRAW.pick,
            show_default=True,
            help="Which ones: the first, those of highest mean, or evenly spread.",
        ),
        click.option(
            "--format",
            type=click.Choice(["png", "webp", "jpg"]),
            default=DRAW.format,
            show_default=True,
            help="Of the pictures.",
        ),
    ]
)
"""Those of DrawOptions that say how a picture looks; `kernels` takes them too."""


@click.command("run")
@click.argument("model", required=False)
@click.argument("images", nargs=-1, metavar="IMAGE...")
@opts.layer_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("featviz-out"),
    show_default=True,
    help="The run directory.",
)
@click.option("--overwrite", is_flag=True, help="Replace the run in --out.")
@click.option("-0", "--null", "nul", is_flag=True, help="With IMAGE -: paths end with NUL.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line for each image on stdout.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@draw_options
@click.option("--report", is_flag=True, help="Make a gallery in HTML of it at the end.")
@click.option("--tensors", type=click.Choice(["npy"]), help="Keep the raw tensors as well.")
@opts.input_options
@opts.model_options
@opts.config_option
@opts.verbosity_options
@click.pass_context
def command(ctx: click.Context, /, model: str | None, images: Sequence[str], **given: Any) -> int:
    """Draw the feature maps of images into a run directory.

    MODEL is a torchvision name, a file (.pth .pt .ckpt .bin .safetensors), or a factory
    (pkg.mod:factory, file.py:factory). IMAGE is a file, a folder, a quoted glob, or - for a list
    of paths on stdin. For a video model the stills of a folder, or an animation, are a clip.

    \b
    Examples:
      featviz run resnet18 cat.jpg
      featviz run model.pth photos/ --layers Conv2d,ReLU --out maps
      featviz run weights.safetensors cat.jpg --layers 're:^layer[34]'
      featviz run net.py:make_net scan.png --channels 1 --size 256 --cmap viridis
      featviz run inception_v3 cat.jpg --layers 'fn:relu@Mixed_5*'
      featviz run raft_small left.png right.png --layers 'Conv2d@*flow_head*'
      find . -name '*.png' -print0 | featviz run resnet18 - -0 --json

    Exit codes: 0 done, 1 failed, 2 usage, 3 some images failed.
    """
    model = opts.given_or_config(ctx, "model", model)
    images = opts.given_or_config(ctx, "images", images)
    from featviz.requirements import require_torch

    require_torch()
    from featviz import estimate, pipeline

    source, options = opts.to_model_options(str(model), given), _run_options(given)
    if given["dry_run"]:
        click.echo(estimate.dry_run(source, images, options).render(given["as_json"]))
        return 0
    with _progress(given["as_json"]) as progress:
        result = pipeline.run(source, images, options, progress)
    _summarise(result)
    if given["report"]:
        _report(result.out)
    return result.exit_code


def _report(out: Path) -> None:
    from featviz.report import ReportOptions, build_report

    log.info("report in %s", build_report(out, ReportOptions()).page)


def _run_options(given: dict[str, Any]) -> Any:
    from featviz.pipeline import RunOptions

    return RunOptions(
        layers=",".join(given["layers"]) or None,
        out=given["out"],
        overwrite=given["overwrite"],
        nul_separated=given["nul"],
        draw=_draw_options(given),
        inputs=opts.to_input_options(given),
    )


def _draw_options(given: dict[str, Any]) -> DrawOptions:
    return DrawOptions(**{f.name: opts.no_auto(given[f.name]) for f in fields(DrawOptions)})


@contextmanager
def _progress(as_json: bool) -> Iterator[Progress]:
    """JSON lines on stdout if asked for; failures on stderr; a bar only on a terminal."""
    with opts.bar() as advance:

        def report(result: ImageResult, total: int) -> None:
            advance(total)
            if result.error is not None:
                click.echo(f"error: {result.image}: {result.error}", err=True)
                if result.hint:
                    click.echo(f"hint: {result.hint}", err=True)
            if as_json:
                click.echo(json.dumps(_line(result), ensure_ascii=False))

        yield report


def _line(result: ImageResult) -> dict[str, Any]:
    if result.error is not None:
        return {"image": result.image, "error": result.error}
    return {
        "image": result.image,
        "folder": result.folder,
        "files": [capture.file for capture in result.captures],
        "skipped": len(result.skipped),
        "never_ran": list(result.never_ran),
    }


def _summarise(result: RunResult) -> None:
    done = [image for image in result.images if image.error is None]
    _warn("never ran", {name: "" for image in done for name in image.never_ran})
    _warn(
        "skipped",
        {skip.layer or skip.type: skip.reason for image in done for skip in image.skipped},
    )
    if done:
        pictures = sum(len(image.captures) for image in done)
        log.info("%d pictures of %d images in %s", pictures, len(done), result.out)


def _warn(what: str, layers: Mapping[str, str]) -> None:
    """Name the first few layers that gave no picture, and how many there are."""
    if not layers:
        return
    named = [f"{name} ({reason})" if reason else name for name, reason in layers.items()]
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    log.warning("%s: %s%s", what, ", ".join(named[:_NAMED]), more)
