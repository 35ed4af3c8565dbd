"""`featviz cam`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featviz.cli import options as opts
from featviz.cli import output
from featviz.cli.command import DRAWING, GRADIENTS, Command
from featviz.cli.run_options import layout_option
from featviz.cli.values import given_or_config
from featviz.records import ClassMapOptions
from featviz.text import counted, listed

if TYPE_CHECKING:
    from featviz.inspection.explained import ImageCam

log = logging.getLogger(__name__)


_of_maps = partial(opts.field_option, ClassMapOptions)


@click.command("cam", cls=Command)
@opts.model_argument
@opts.images_argument
@_of_maps(
    "--target",
    "Show the evidence for this: top1, class:N, class:NAME, sum, mean, norm, "
    "output[KEY]:sum|mean|norm, layer:NAME or layer:NAME:CHANNEL.",
    metavar="TARGET",
    show_default="the predicted class",
    group=GRADIENTS,
    first="Show the evidence for this class, such as class:281 or class:tabby.",
)
@_of_maps(
    "--method",
    "Make the map in this way; xgradcam and gradxact also show what speaks against the target.",
    group=GRADIENTS,
    first=True,
)
@opts.layers_option(
    opts.select_layers,
    default="the last layer that gives maps",
    first=opts.select_in_short,
)
@_of_maps(
    "--overlay",
    "Blend each map with the input: 0 shows the input alone, 1 the map alone.",
    type=float,
    metavar="ALPHA",
    group=DRAWING,
)
@_of_maps(
    "--cmap",
    "Colour maps with auto (viridis; coolwarm for maps with a sign), grey, or a colormap of "
    "matplotlib.",
    metavar="CMAP",
    group=DRAWING,
)
@layout_option
@opts.out_option(
    "Write cam-IMAGE.png of each image into this folder; or the picture of one image into this "
    "PNG file.",
    ".",
)
@opts.overwrite_option("any file")
@opts.open_option("Open the first picture.")
@opts.null_option
@opts.json_option("one JSON line for each image")
@opts.input_options
@opts.model_options
@opts.config_option
@opts.verbosity_options
@click.pass_context
def command(ctx: click.Context, /, model: str | None, images: Sequence[str], **given: Any) -> int:
    """Show where in an image the evidence for a class lies.

    A class activation map weighs what a layer gives by the gradient of the
    class's score there, and lies over the image: bright places raise the score.
    Each image gets one picture, which names the prediction and the target.

    {MODEL}

    \b
    Examples:
      featviz cam resnet18 cat.jpg
      featviz cam resnet18 cat.jpg --target class:tabby --method layercam
      featviz cam model.pth photos/ --layers layer3,layer4 --out cams
    \f
    IMAGE is what `featviz run` takes. Without --layers the last layer is taken
    whose output has places of the image that the target depends on; of a vision
    transformer this is the norm before the last attention. The same maps come
    into a run directory, with a report, by `featviz run --reduce gradcam`.

    Exit codes: 0 done, 1 failed, 2 usage, 3 some images failed, 130
    interrupted.
    """
    source = opts.to_model_options(given_or_config(ctx, "model", model), given)
    images = given_or_config(ctx, "images", images)
    from featviz.inspection.cam import CamOptions, cam

    options = CamOptions(
        layers=opts.selectors(given),
        nul_separated=given["nul"],
        out=given["out"],
        overwrite=given["overwrite"],
        maps=ClassMapOptions(**opts.fields_of(ClassMapOptions, given)),
        inputs=opts.to_input_options(given),
    )
    return _conclude(_tell(cam(source, images, options), given["as_json"]), given["open"])


def _tell(results: Iterable[ImageCam], as_json: bool) -> tuple[list[Path], int]:
    """Say what becomes of each image; the pictures, and how many images failed."""
    pictures: list[Path] = []
    failed = 0
    for result in results:
        if as_json:
            output.document(result.as_json(), indent=None)
        if result.error is not None:
            failed += 1
            output.error(f"{result.image}: {result.error.message}", result.error.hint)
            continue
        for skip in result.skipped:
            log.warning("skipped: %s (%s)", skip.layer or skip.type, skip.reason)
        log.info("%s at %s", result.words, listed([one.name for one in result.maps], 3))
        pictures += [result.path] if result.path is not None else []
    return pictures, failed


def _conclude(told: tuple[list[Path], int], show: bool) -> int:
    pictures, failed = told
    if not pictures:
        return 1
    place = pictures[0] if show or len(pictures) == 1 else pictures[0].parent
    output.written(counted(len(pictures), "picture"), place, show)
    return 3 if failed else 0
