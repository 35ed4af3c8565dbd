"""`featviz exemplars`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import click

from featviz.cli import options as opts
from featviz.cli import output
from featviz.cli.command import Command
from featviz.options import ExemplarChoice, ExemplarOptions, InputOptions, ModelOptions
from featviz.text import counted, listed

if TYPE_CHECKING:
    from featviz.exemplars.exemplars import ExemplarResult

log = logging.getLogger(__name__)

_NAMED = 3
"""Layers that a warning names; exemplars.json has them all."""


@click.command("exemplars", cls=Command)
@opts.model_argument
@opts.images_argument
@opts.options_of(ExemplarOptions, ExemplarChoice, InputOptions, ModelOptions)
@opts.no_shard_option
@opts.json_option("exemplars.json")
@opts.general_options
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> int:
    """Show the images, and the places in them, that excite each channel most.

    For each channel the best images are kept, each cut to what the strongest
    unit sees of the input, its receptive field. --out holds a sheet for each
    layer, a picture for each channel, and exemplars.json.

    {MODEL}

    \b
    Examples:
      featviz exemplars resnet18 photos/ --layers layer4 --top 9
      featviz exemplars model.pth photos/ --layers 'Conv2d#:3' --batch-size 16
      featviz exemplars model.pth train/ --layers layer3 --per-class --top 4
    \f
    Any number of images go through the model once. Values that are NaN or
    infinite excite nothing; of equal values the earlier image comes first.

    \b
      featviz exemplars resnet18 photos/ --layers avgpool --pick mean --json

    Exit codes: 0 done, 1 failed, 2 usage, 3 some images failed.
    """
    source = opts.to_model_options(ctx, given)
    images = opts.images_of(ctx, given)
    choice, inputs = opts.record(ExemplarChoice, given), opts.record(InputOptions, given)
    options = opts.record(ExemplarOptions, given, choice=choice, inputs=inputs)
    from featviz.exemplars.exemplars import find_exemplars
    from featviz.pipeline.share import refuse_shares

    refuse_shares("exemplars", "it ranks all images against each other", given["shard"])
    with output.batch_progress() as progress:
        result = find_exemplars(source, images, options, progress)
    if given["as_json"]:
        output.document(result.record.as_json())
    else:
        output.table(*result.table)
    _conclude(result)
    return result.exit_code


def _conclude(result: ExemplarResult) -> None:
    """On stderr: what was left out, how many images were seen, and where the results are."""
    record = result.record
    skipped = [f"{one.layer} ({one.reason})" for one in record.skipped]
    for what, layers in (("skipped", skipped), ("never ran", record.never_ran)):
        if layers:
            log.warning("%s: %s", what, listed(layers, _NAMED))
    log.info("%s seen", counted(record.images.seen, "image"))
    log.info("results in %s", result.out)
