"""`featviz run`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from featviz.cli import complete, pass_options
from featviz.cli import options as opts
from featviz.cli.draw_options import draw_options, tensorboard_option, to_draw_options, view_options
from featviz.cli.progress import LayersLeftOut, shown_progress, summarise
from featviz.cli.types import BytesType
from featviz.records import DrawOptions, Limits
from featviz.records.checking import choices


@click.command("run")
@click.argument("model", required=False, shell_complete=complete.models)
@click.argument("images", nargs=-1, metavar="IMAGE...", shell_complete=complete.paths)
@opts.layer_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("featviz-out"),
    show_default=True,
    help="The run directory.",
)
@click.option("--overwrite", is_flag=True, help="Replace the run in --out.")
@click.option("--resume", is_flag=True, help="Go on with the run in --out where it stopped.")
@click.option(
    "--archive",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the run as one zip file, and no folder.",
)
@click.option("--fail-fast", is_flag=True, help="Stop at the first image that fails.")
@click.option(
    "--max-output-size",
    type=BytesType(),
    help="Refuse a run that would write more (500MB), and stop one that does.",
)
@click.option("--max-files", type=click.IntRange(0), help="The same for the number of files.")
@click.option(
    "--shard", metavar="I/N", help="Only the I-th of N parts of the images; merge joins them."
)
@click.option("--jobs", type=int, help="Encoder threads; a quarter of the cores by default.")
@click.option("-0", "--null", "nul", is_flag=True, help="With IMAGE -: paths end with NUL.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line for each image on stdout.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@pass_options.pass_options
@draw_options
@view_options
@tensorboard_option
@click.option("--report", is_flag=True, help="Make a gallery in HTML of it at the end.")
@click.option(
    "--tensors",
    type=click.Choice(choices(DrawOptions, "tensors")),
    help="Keep the raw tensors as well.",
)
@opts.input_options
@opts.model_options
@opts.config_option
@opts.verbosity_options
@click.pass_context
@opts.model_forms
def command(ctx: click.Context, /, model: str | None, images: Sequence[str], **given: Any) -> int:
    """Draw the feature maps of images into a run directory.

    {MODEL} IMAGE is a file, a folder, an archive (photos.tar, .tar.gz,
    .zip), one of its images (photos.tar::a/b.jpg), a quoted glob, or - for a list of paths on
    stdin. For a video model the stills of a folder, or an animation, are a clip.

    \b
    Examples:
      featviz run resnet18 cat.jpg
      featviz run model.pth photos/ --layers Conv2d,ReLU --out maps
      featviz run weights.safetensors cat.jpg --layers 're:^layer[34]'
      featviz run net.py:make_net scan.png --channels 1 --size 256 --cmap viridis
      featviz run inception_v3 cat.jpg --layers 'fn:relu@Mixed_5*'
      featviz run resnet18 cat.jpg --layers layer4 --capture output,grad --target 'class:tabby'
      featviz run resnet18 cat.jpg --order similarity --collapse 0.98 --labels
      featviz run vit_b_16 cat.jpg --reduce pca --overlay 0.6
      featviz run resnet18 photos/ --figure --first 4 --tensorboard runs/resnet18
      featviz run resnet18 cat.jpg --ablate 'layer4.1:5,17' --layers layer4
      featviz run raft_small left.png right.png --layers 'Conv2d@*flow_head*'
      featviz run resnet18 photos.tar --resume --max-output-size 2GB
      find . -name '*.png' -print0 | featviz run resnet18 - -0 --json
      torchrun --nproc-per-node 4 -m featviz run resnet18 photos/    # each takes its share

    Exit codes: 0 done, 1 failed, 2 usage, 3 some images failed, 130 interrupted.
    """
    model = opts.given_or_config(ctx, "model", model)
    images = opts.given_or_config(ctx, "images", images)
    from featviz.models.requirements import require_torch

    require_torch()
    from featviz import pipeline
    from featviz.pipeline import dry_run, processes

    source, options = opts.to_model_options(str(model), given), _run_options(given)
    if given["report"] and given["archive"]:
        raise click.UsageError("--report goes into a folder, and --archive leaves none.", ctx)
    if given["dry_run"]:
        if processes.speaks():
            click.echo(dry_run.dry_run(source, images, options).render(given["as_json"]))
        return 0
    left_out = LayersLeftOut()
    with shown_progress(given["as_json"], left_out) as progress, processes.world() as team:
        result = pipeline.run(source, images, options, progress, team=team)
        first = team.first
    summarise(result, left_out)
    if given["report"] and first:
        _report(result.out)
    return result.exit_code


def _report(out: Path) -> None:
    import logging

    from featviz.report import ReportOptions, build_report

    logging.getLogger(__name__).info("report in %s", build_report(out, ReportOptions()).page)


def _run_options(given: dict[str, Any]) -> Any:
    from featviz.gradients.options import read_options
    from featviz.pipeline.options import RunOptions
    from featviz.pipeline.processes import parse_shard

    return RunOptions(
        layers=",".join(given["layers"]) or None,
        out=given["out"],
        overwrite=given["overwrite"],
        resume=given["resume"],
        archive=given["archive"],
        nul_separated=given["nul"],
        fail_fast=given["fail_fast"],
        jobs=given["jobs"],
        limits=Limits(given["max_output_size"], given["max_files"]),
        tensorboard=given["tensorboard"],
        shard=None if given["shard"] is None else parse_shard(given["shard"]),
        draw=to_draw_options(given),
        inputs=opts.to_input_options(given),
        passes=read_options(given),
    )
