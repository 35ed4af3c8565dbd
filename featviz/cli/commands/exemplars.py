"""`featviz exemplars`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from featviz.cli import options as opts
from featviz.cli import output
from featviz.cli.command import DRAWING, Command
from featviz.cli.values import given_or_config
from featviz.records.exemplars import ExemplarChoice
from featviz.text import counted, listed

if TYPE_CHECKING:
    from featviz.exemplars import ExemplarResult

log = logging.getLogger(__name__)

_NAMED = 3
"""Layers that a warning names; exemplars.json has them all."""


@click.command("exemplars", cls=Command)
@opts.model_argument
@opts.images_argument
@opts.layers_option(
    opts.select_layers, default="one layer for each stage", first=opts.select_in_short
)
@opts.field_option(
    ExemplarChoice, "--top", "Show N images of each channel.", group=DRAWING, first=True
)
@opts.field_option(
    ExemplarChoice,
    "--by",
    "Rank images by the largest value of the channel's map, and show what the unit there sees; or "
    "by the mean of the map, and show whole images.",
    group=DRAWING,
    first="Rank images by the largest value, or by the mean of the map.",
)
@opts.field_option(
    ExemplarChoice,
    "--per-class",
    "Choose the images of each class apart; the class of an image is the name of its folder.",
    group=DRAWING,
    first=True,
)
@opts.batch_size_option
@opts.shard_option
@opts.readers_option
@opts.timeout_option
@opts.out_option("Write the pictures and exemplars.json into this folder.", "featviz-exemplars")
@opts.overwrite_option("the exemplars")
@opts.null_option
@opts.json_option("exemplars.json")
@opts.input_options
@opts.model_options
@opts.config_option
@opts.verbosity_options
@click.pass_context
def command(ctx: click.Context, /, model: str | None, images: Sequence[str], **given: Any) -> int:
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
      featviz exemplars resnet18 photos/ --layers avgpool --by mean --json
      torchrun --nproc-per-node 4 -m featviz exemplars resnet18 photos/
      featviz exemplars resnet18 photos/ --shard 2/2 --out part2
      featviz merge part1 part2 --out whole

    Exit codes: 0 done, 1 failed, 2 usage, 3 some images failed.
    """
    source = opts.to_model_options(given_or_config(ctx, "model", model), given)
    images = given_or_config(ctx, "images", images)
    options = _options(given)
    from featviz.exemplars import find_exemplars
    from featviz.pipeline import processes

    with output.batch_progress() as progress, processes.world(given["timeout"]) as team:
        result = find_exemplars(source, images, options, progress, team=team)
    if result is None:
        return 0
    if given["as_json"]:
        output.document(result.record.as_json())
    else:
        output.table(*result.table)
    _conclude(result)
    return result.exit_code


def _options(given: dict[str, Any]) -> Any:
    from featviz.exemplars.options import ExemplarOptions
    from featviz.pipeline.processes import parse_shard

    return ExemplarOptions(
        layers=opts.selectors(given),
        choice=ExemplarChoice(**opts.fields_of(ExemplarChoice, given)),
        inputs=opts.to_input_options(given),
        shard=None if given["shard"] is None else parse_shard(given["shard"]),
        nul_separated=given["nul"],
        **{name: given[name] for name in ("out", "overwrite", "batch_size")},
    )


def _conclude(result: ExemplarResult) -> None:
    """On stderr: what was left out, how many images were seen, and where the results are."""
    record = result.record
    skipped = [f"{one.layer} ({one.reason})" for one in record.skipped]
    for what, layers in (("skipped", skipped), ("never ran", record.never_ran)):
        if layers:
            log.warning("%s: %s", what, listed(layers, _NAMED))
    log.info("%s seen", counted(record.images.seen, "image"))
    log.info("results in %s", result.out)
