"""`featviz cam`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featviz.cli import options as opts
from featviz.cli import output
from featviz.cli.command import Command
from featviz.options import CamOptions, ClassMapOptions, InputOptions, ModelOptions
from featviz.text import counted, listed

if TYPE_CHECKING:
    from featviz.inspection.cam import ImageCam

log = logging.getLogger(__name__)


@click.command("cam", cls=Command)
@opts.model_argument
@opts.images_argument
@opts.options_of(ClassMapOptions, CamOptions, InputOptions, ModelOptions, out=Path())
@opts.open_option("Open the first picture.")
@opts.json_option("one JSON line for each image")
@opts.general_options
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> int:
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
    source = opts.to_model_options(ctx, given)
    images = opts.images_of(ctx, given)
    from featviz.inspection.cam import cam

    maps, inputs = opts.record(ClassMapOptions, given), opts.record(InputOptions, given)
    options = opts.record(CamOptions, given, maps=maps, inputs=inputs)
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
