"""`featviz run`."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs

from featviz.cli import options as opts
from featviz.cli import output
from featviz.cli.command import Command
from featviz.errors import UsageError
from featviz.files.urls import Url
from featviz.options import (
    OUTPUT,
    DrawOptions,
    InputOptions,
    ModelOptions,
    PassOptions,
    ReportOptions,
    RunOptions,
)
from featviz.records import UNLIKE_OUTPUTS, Guess, ImageResult, Outcome, RunResult
from featviz.text import counted, listed

if TYPE_CHECKING:
    from featviz.pipeline import Progress

log = logging.getLogger(__name__)

_TOLD = 10
"""Images whose predictions are told on stderr; beyond them the lines would push all others away."""

_NAMED = 3
"""Layers without a picture that are named on stderr; the manifests name them all."""


@click.command("run", cls=Command)
@opts.model_argument
@opts.images_argument
@opts.options_of(RunOptions, PassOptions, DrawOptions, InputOptions, ModelOptions)
@opts.open_option("Build the HTML gallery of --report, and open it in the browser.")
@opts.json_option("one JSON line for each image")
@opts.own_option("--report", group=OUTPUT, help="Build an HTML report of the run at its end.")
@opts.own_option("--dry-run", group=OUTPUT, help="Print what would be written, and write nothing.")
@opts.general_options
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> int:
    """Draw the feature maps of images into a run directory.

    {MODEL}

    IMAGE is a picture or array (.npy, .npz, .pt), a folder, an archive, a
    quoted glob, or - for a list of paths on stdin.

    \b
    Examples:
      featviz run resnet18 cat.jpg
      featviz run resnet18 cat.jpg --layers conv1,layer4 --cmap viridis --open
      featviz run model.pth photos/ --layers Conv2d,ReLU --out maps
      featviz run weights.pth 'photos/*.png' --arch resnet50
      featviz run net.py:Net scan.png --size 256
    \f
    An archive is a .zip, .tar or .tar.gz; photos.zip::a/b.jpg is one of its
    images, and 'shards-{000..063}.tar' are 64 archives. Each may be a URL:
    s3://bucket/photos/, gs://, https://, hf:// (with s3fs, gcsfs, aiohttp or
    huggingface_hub). For a video model, the stills of a folder are one clip,
    and so is an animation.

    \b
    More examples:
      featviz run weights.safetensors cat.jpg --layers 're:^layer[34]'
      featviz run inception_v3 cat.jpg --layers 'fn:relu@Mixed_5*'
      featviz run resnet18 cat.jpg --order similarity --collapse 0.98 --labels
      featviz run vit_b_16 cat.jpg --reduce pca --overlay 0.6
      featviz run resnet18 photos/ --figure --tensorboard logs
      featviz run raft_small left.png right.png --layers 'Conv2d@*flow_head*'

    \b
    Gradients of one class, and what becomes of an image without two channels:
      featviz run resnet18 cat.jpg --capture output,grad --target class:tabby
      featviz run resnet18 cat.jpg --layers layer4 --ablate 'layer4.1:5,17'

    \b
    Many images: go on after a stop, read a list, share the work:
      featviz run resnet18 photos.tar --resume --max-output-size 2GB
      find . -name '*.png' -print0 | featviz run resnet18 - -0 --json
      torchrun --nproc-per-node 4 -m featviz run resnet18 photos/

    Exit codes: 0 done, 1 failed, 2 usage, 3 some images failed, 130
    interrupted, 141 stdout closed.
    """
    source = opts.to_model_options(ctx, given)
    images = opts.images_of(ctx, given)
    from featviz import pipeline
    from featviz.pipeline import dry_run, share

    options = _run_options(given)
    wanted = next((f"--{name}" for name in ("report", "open") if given[name]), None)
    if wanted and isinstance(options.out, Url):
        raise click.UsageError(f"{wanted} needs a folder, and --out URL leaves none.", ctx)
    shard = share.shard_of_process() if options.shard is None else None
    if given["dry_run"]:
        if shard is None or not shard.index:
            output.text(dry_run.dry_run(source, images, options).render(given["as_json"]))
        return 0
    if shard is not None:
        if "-" in images and share.runs_in_torchrun():
            words = "- lists images on stdin, which the processes of torchrun cannot divide"
            raise UsageError(words, "give a folder, or start each process with its own list")
        log.info("this process draws shard %s of the images", shard)
        options = structs.replace(options, shard=shard)
    noted = Noted()
    with _progress(given["as_json"], noted) as progress:
        result = pipeline.run(source, images, options, progress)
    _conclude(result, noted, not wanted)
    if wanted and (result.whole or options.shard is None):
        _report(options.out, given["open"])
    return share.exit_code(result) if shard is not None else result.exit_code


def _report(out: Path, show: bool) -> None:
    from featviz.report import build_report

    output.written("report", build_report(out, ReportOptions()).page, show)


def _run_options(given: dict[str, Any]) -> RunOptions:
    from featviz.pipeline.prepare import for_drawing

    draw = opts.record(DrawOptions, given)
    inputs = opts.record(InputOptions, given)
    passes = for_drawing(opts.record(PassOptions, given), draw, given["seed"])
    return opts.record(RunOptions, given, draw=draw, inputs=inputs, passes=passes)


@dataclass
class Noted:
    """What the end of a run says of all images: predictions that were not told, and layers that
    gave no picture."""

    outcomes: int = 0
    """Images of which there was something to tell."""
    never_ran: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """By layer: the reason."""

    def add(self, result: ImageResult) -> bool:
        """Note one image; whether what the model said of it is told."""
        outcome = result.outcome
        self.outcomes += bool((outcome.prediction or outcome.intervened) and not result.kept)
        self.never_ran |= dict.fromkeys(result.never_ran, "")
        self.skipped |= {skip.layer or skip.type: skip.reason for skip in result.skipped}
        return self.outcomes <= _TOLD


@contextmanager
def _progress(as_json: bool, noted: Noted) -> Iterator[Progress]:
    """Print JSON lines on stdout if asked for, failures on stderr, and a bar on a terminal."""
    with output.progress_bar() as advance:

        def report(result: ImageResult, total: int) -> None:
            advance(total)
            _say(result, noted.add(result))
            if as_json:
                output.document(_line(result), indent=None)

        yield report


def _line(result: ImageResult) -> dict[str, Any]:
    if result.error is not None:
        return {"image": result.name, "error": result.error}
    outcome = result.outcome
    return {
        "image": result.name,
        "folder": result.folder,
        "files": [capture.file for capture in result.rows],
        "skipped": len(result.skipped),
        "never_ran": list(result.never_ran),
        "prediction": [asdict(guess) for guess in outcome.prediction],
        **({"effect": outcome.effect} if outcome.intervened else {}),
        **({"kept": True} if result.kept else {}),
    }


def _say(result: ImageResult, in_full: bool) -> None:
    """What went wrong; in full also the prediction, and what interventions made of it."""
    if result.error is not None:
        output.image_error(result.name, result.error, result.hint)
    if not in_full:
        return
    outcome = result.outcome
    if outcome.before:
        log.info("%s before: %s", result.name, _words(outcome.before))
    if outcome.prediction and not result.kept:
        after = " after" if outcome.intervened else ""
        log.info("%s%s: %s", result.name, after, _words(outcome.prediction))
    if outcome.intervened:
        log.info("%s: %s", result.name, _change(outcome))


def _change(outcome: Outcome) -> str:
    if outcome.largest_change is None:
        return f"the output cannot be compared: {UNLIKE_OUTPUTS}"
    words = f"the output changed by at most {outcome.largest_change:.4g}"
    if outcome.nonfinite:
        words += f", and {outcome.nonfinite} of its values became NaN or infinite, or ceased to be"
    return words


def _words(guesses: Sequence[Guess]) -> str:
    return ", ".join(guess.words for guess in guesses)


def _conclude(result: RunResult, noted: Noted, to_look: bool) -> None:
    """Say on stderr what gave no picture, what is missing, and on the last line what was written,
    what failed, and, if asked for, how to look at the run."""
    done = [image for image in result.images if image.error is None]
    without = {"never ran": noted.never_ran, "skipped": noted.skipped}
    words = [f"{what}: {_named(layers)}" for what, layers in without.items() if layers]
    if result.drew_nothing:
        output.error(
            f"no picture was drawn; {'; '.join(words) or 'no layer was taken'}",
            "--layers takes others; `featviz layers MODEL` lists them, with shapes and calls",
        )
    else:
        for line in words:
            log.warning("%s", line)
    if result.missing:
        why = "interrupted" if result.interrupted else "stopped"
        missing = counted(len(result.missing), "image")
        log.warning("%s: %s missing, %d complete; --resume goes on", why, missing, len(done))
    if noted.outcomes > _TOLD:
        more = counted(noted.outcomes - _TOLD, "more image")
        log.info("what the model said of %s is in manifest.json; --json prints it", more)
    if done:
        kept = sum(image.kept for image in done)
        before = f" ({kept} {'was' if kept == 1 else 'were'} complete before)" if kept else ""
        counts = f"{counted(result.pictures, 'picture')} of {counted(len(done), 'image')}"
        failed = _failed([image.name for image in result.images if image.error is not None])
        look = _command_to_look(result.root) if to_look else ""
        log.info("%s in %s%s%s%s", counts, result.root, before, failed, look)


def _failed(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f"; {counted(len(names), 'image')} failed: {listed(names, _NAMED)} (see run.json)"


def _command_to_look(out: Path | Url) -> str:
    here = ["--single-file", "--out", "maps.html"] if isinstance(out, Url) else []
    return f"; to look at them: {shlex.join(['featviz', 'report', str(out), *here, '--open'])}"


def _named(layers: Mapping[str, str]) -> str:
    """The first few layers that gave no picture, and how many there are."""
    named = [f"{name} ({reason})" if reason else name for name, reason in layers.items()]
    return listed(named, _NAMED)
