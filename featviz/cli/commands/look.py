"""`featviz look`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import click

from featviz.cli import options as opts
from featviz.cli import output
from featviz.cli.command import Command
from featviz.options import InputOptions, LookOptions, ModelOptions, PageOptions
from featviz.text import counted, listed

if TYPE_CHECKING:
    from featviz.inspection.look import LookResult

log = logging.getLogger(__name__)

_NAMED = 3
"""Layers without a row that are named on stderr; --json names them all."""


@click.command("look", cls=Command)
@opts.model_argument
@opts.images_argument
@opts.options_of(LookOptions, PageOptions, InputOptions, ModelOptions)
@opts.open_option("Open the picture.")
@opts.json_option()
@opts.general_options
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> int:
    """Draw one quick picture of what a model makes of an image.

    It has the input, the prediction, and a row for each layer with the maps
    that tell most, with their channels and values.

    {MODEL}

    \b
    Examples:
      featviz look resnet18 cat.jpg
      featviz look model.pth cat.jpg --layers 'layer1.*' --maps 12
      featviz look vit_b_16 cat.jpg --out vit.png --open
    \f
    IMAGE is what `featviz run` takes; of several images, the first is shown.
    Of maps that look alike one is shown; each runs from its least value (dark)
    to its greatest (bright), and one that is constant is left out.

    Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted.
    """
    source = opts.to_model_options(ctx, given)
    images = opts.images_of(ctx, given)
    from featviz.inspection.look import look

    page, inputs = opts.record(PageOptions, given), opts.record(InputOptions, given)
    result = look(source, images, opts.record(LookOptions, given, page=page, inputs=inputs))
    if given["as_json"]:
        output.document(result.as_json())
    _say(result)
    output.written(counted(len(result.layers), "layer"), result.path, given["open"])
    return 0


def _say(result: LookResult) -> None:
    for skip in result.skipped:
        log.warning("skipped: %s (%s)", skip.layer or skip.type, skip.reason)
    if result.never_ran:
        log.warning("never ran: %s", listed(result.never_ran, _NAMED))
    if result.prediction:
        words = ", ".join(guess.words for guess in result.prediction)
        log.info("%s: %s", result.name, words)
