"""`featviz run`."""

from __future__ import annotations

import logging
import shlex
from dataclasses import asdict, dataclass, field
from typing import Any

from msgspec import structs

from featviz.cli import output
from featviz.cli.options import IMAGES, MODEL, Given, command, flag, open_flag
from featviz.errors import UsageError
from featviz.files.urls import Url
from featviz.gradients.targets import check_options, for_drawing
from featviz.options import (
    OUTPUT,
    DrawOptions,
    ModelOptions,
    PassOptions,
    ReportOptions,
    RunOptions,
)
from featviz.records import UNLIKE_OUTPUTS, ImageResult, RunResult
from featviz.text import counted, listed

log = logging.getLogger(__name__)

_NAMED = 3


def _passes(given: Given) -> PassOptions:
    """What is captured and changed, checked beside what is drawn of it."""
    draw = given.record(DrawOptions)
    passes = for_drawing(given.record(PassOptions), draw, given["seed"])
    draw.check()
    check_options(passes, draw)
    return passes


@command(
    *(RunOptions, ModelOptions),
    arguments=[MODEL, IMAGES],
    check=_passes,
    flags=[
        open_flag("Build the HTML gallery of --report, and open it in the browser."),
        flag("Build an HTML report of the run at its end.", "--report", group=OUTPUT),
        flag("Print what would be written, and write nothing.", "--dry-run", group=OUTPUT),
    ],
    json="one JSON line for each image",
    first=("model_args", "trust"),
)
def run(given: Given) -> int:
    """Draw the feature maps of images into a run directory.

    {MODEL}

    IMAGE is a picture, array (.npy, .npz, .pt) or video, a folder, an archive,
    a quoted glob, or - for a list of paths on stdin.

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
      featviz run net.py:Generator --input z=randn:1,128

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
    from featviz.run import dry_run, share
    from featviz.run import run as pipeline

    options = given.record(RunOptions, passes=_passes(given))
    wanted = next((f"--{name}" for name in ("report", "open") if given[name]), None)
    if wanted and isinstance(options.out, Url):
        raise UsageError(f"{wanted} needs a folder, and --out URL leaves none", "leave it out")
    shard = share.shard_of_process() if options.shard is None else None
    if given["dry_run"]:
        if shard is None or not shard.index:
            plan = dry_run.dry_run(given.source, given.images, options)
            if given["json"]:
                output.document(plan)
            else:
                output.text(dry_run.render(plan))
        return 0
    if shard is not None:
        if "-" in given.images and share.runs_in_torchrun():
            words = "- lists images on stdin, which the processes of torchrun cannot divide"
            raise UsageError(words, "give a folder, or start each process with its own list")
        log.info("this process draws shard %s of the images", shard)
        options = structs.replace(options, shard=shard)
    messages = Messages()
    with output.progress_bar() as advance:

        def report(image: ImageResult, total: int) -> None:
            advance(total)
            messages.add(image, with_outcome=total == 1)
            if given["json"]:
                output.document(_line(image), indent=None)

        result = pipeline.run(given.source, given.images, options, report)
    messages.conclude(result, to_look=not wanted)
    if wanted and (result.whole or options.shard is None):
        from featviz.report import build_report

        output.written("report", build_report(options.out, ReportOptions()).page, given["open"])
    return share.exit_code(result) if shard is not None else result.exit_code


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


@dataclass
class Messages:
    """What is said on stderr of each image, and of all of them at the end of a run."""

    never_ran: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, result: ImageResult, with_outcome: bool) -> None:
        """Say what went wrong with an image; where it is asked for also the prediction, and what
        interventions changed; -v asks for it."""
        outcome = result.outcome
        self.never_ran |= dict.fromkeys(result.never_ran, "")
        self.skipped |= {skip.layer or skip.type: skip.reason for skip in result.skipped}
        if result.error is not None:
            output.image_error(result.name, result.error, result.hint)
        if result.kept or not (with_outcome or log.isEnabledFor(logging.DEBUG)):
            return
        after = " after" if outcome.intervened else ""
        for when, guesses in ((" before", outcome.before), (after, outcome.prediction)):
            if guesses:
                words = ", ".join(guess.words for guess in guesses)
                log.info("%s%s: %s", result.name, when, words)
        if outcome.intervened:
            words = f"the output cannot be compared: {UNLIKE_OUTPUTS}"
            if outcome.largest_change is not None:
                words = f"the output changed by at most {outcome.largest_change:.4g}"
                if (count := outcome.nonfinite) > 0:
                    became = "of its values became NaN or infinite, or ceased to be"
                    words += f", and {count} {became}"
            log.info("%s: %s", result.name, words)

    def conclude(self, result: RunResult, to_look: bool) -> None:
        """Say what gave no picture, what is missing, and on the last line what was written, what
        failed, and, if asked for, how to look at the run."""
        done = [image for image in result.images if image.error is None]
        words = []
        for what, layers in (("never ran", self.never_ran), ("skipped", self.skipped)):
            named = [f"{name} ({reason})" if reason else name for name, reason in layers.items()]
            words += [f"{what}: {listed(named, _NAMED)}"] if named else []
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
        if not done:
            return
        line = f"{counted(result.pictures, 'picture')} of {counted(len(done), 'image')}"
        line += f" in {result.root}"
        if kept := sum(image.kept for image in done):
            line += f" ({kept} {'was' if kept == 1 else 'were'} complete before)"
        if failed := [image.name for image in result.failures]:
            names = listed(failed, _NAMED)
            line += f"; {counted(len(failed), 'image')} failed: {names} (see run.json)"
        if to_look:
            url = ["--single-file", "--out", "maps.html"] if isinstance(result.root, Url) else []
            again = shlex.join(["featviz", "report", str(result.root), *url, "--open"])
            line += f"; to look at them: {again}"
        log.info("%s", line)
