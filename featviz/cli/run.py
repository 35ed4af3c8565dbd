"""`featviz run`."""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict

from msgspec import structs

from featviz.cli import output
from featviz.cli.options import IMAGES, MODEL, ClickOption, Given, command
from featviz.errors import NOTHING_DRAWN, UsageError
from featviz.gradients.targets import check_options, for_drawing
from featviz.options import OUTPUT, DrawOptions, ModelOptions, PassOptions, RunOptions, read_from
from featviz.records import UNLIKE_OUTPUTS, ImageResult, Outcome, RunResult, Shard
from featviz.text import counted, listed, quoted

log = logging.getLogger(__name__)

_NAMED = 3


def _passes(given: Given) -> PassOptions:
    """What is captured and changed, checked beside what is drawn of it."""
    draw = read_from(DrawOptions, {**given})
    passes = for_drawing(read_from(PassOptions, {**given}), draw, given["seed"])
    draw.check()
    check_options(passes, draw)
    return passes


@command(
    *(RunOptions, ModelOptions),
    arguments=[MODEL, IMAGES],
    check=_passes,
    flags=[
        ClickOption(
            "Build the HTML gallery of --report, and open it in the browser.",
            "--open",
            group=OUTPUT,
            first=True,
        ),
        ClickOption("Build an HTML report of the run at its end.", "--report", group=OUTPUT),
        ClickOption("Print what would be written, and write nothing.", "--dry-run", group=OUTPUT),
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
    images. Each may be a URL: s3://bucket/photos/, gs://, https://, hf://. For
    a video model, the stills of a folder are one clip, and so is an animation.

    \b
    More examples:
      featviz run inception_v3 cat.jpg --layers 'fn:relu@Mixed_5*'
      featviz run vit_b_16 cat.jpg --reduce pca --overlay 0.6
      featviz run raft_small left.png right.png --layers 'Conv2d@*flow_head*'
      featviz run net.py:Generator --input z=randn:1,128
      featviz run resnet18 cat.jpg --capture output,grad --target class:tabby
      find . -name '*.png' -print0 | featviz run resnet18 - -0 --json
      torchrun --nproc-per-node 4 -m featviz run resnet18 photos/

    Exit codes: 0 done, 1 failed, 2 usage, 3 some images failed, 130
    interrupted, 141 stdout closed.
    """
    from featviz.run import run as pipeline

    options = read_from(RunOptions, {**given}, passes=_passes(given))
    source, images = given["source"], given["images"]
    shard = shard_of_process() if options.shard is None else None
    if given["dry_run"]:
        from featviz.run import dry_run

        if shard is None or not shard.index:  # the first process speaks for all
            plan = dry_run.dry_run(source, images, options)
            output.document(plan) if given["json"] else output.text(dry_run.render(plan))
        return 0
    if shard is not None:
        if "-" in images and _runs_in_torchrun():
            words = "- lists images on stdin, which the processes of torchrun cannot divide"
            raise UsageError(words, "give a folder, or start each process with its own list")
        log.info("this process draws shard %s of the images", shard)
        options = structs.replace(options, shard=shard)
    unseen: dict[str, dict[str, str]] = {"never ran": {}, "skipped": {}}
    with output.progress_bar() as advance:

        def report(image: ImageResult, total: int) -> None:
            advance(total)
            unseen["never ran"] |= dict.fromkeys(image.never_ran, "")
            unseen["skipped"] |= {skip.layer or skip.type: skip.reason for skip in image.skipped}
            if image.error is not None:
                output.image_error(image.name, image.error, image.hint)
            elif not image.kept and (total == 1 or log.isEnabledFor(logging.DEBUG)):
                _say_outcome(image.name, image.outcome)
            if given["json"] and image.error is not None:
                output.document({"image": image.name, "error": image.error}, indent=None)
            elif given["json"]:
                line = {
                    "image": image.name,
                    "folder": image.folder,
                    "files": [capture.file for capture in image.rows],
                    "skipped": len(image.skipped),
                    "never_ran": list(image.never_ran),
                    "prediction": [asdict(guess) for guess in image.outcome.prediction],
                }
                line |= {"effect": image.outcome.effect} if image.outcome.intervened else {}
                output.document(line | ({"kept": True} if image.kept else {}), indent=None)

        result = pipeline.run(source, images, options, report)
    with_report = given["report"] or given["open"]
    _conclude(result, unseen, to_look=not with_report)
    if with_report and (result.whole or options.shard is None):
        from featviz.options.commands import ReportOptions
        from featviz.report import build_report

        output.written("report", build_report(options.folder, ReportOptions()).page, given["open"])
    if shard is None:
        return result.exit_code
    # torchrun ends the others where one says that images have failed: the last one says it for all
    only_failed = result.failures and not (result.missing or result.interrupted)
    if only_failed and not result.whole and _runs_in_torchrun():
        return 0
    return result.exit_code or (3 if result.whole and result.all_failures else 0)


def _say_outcome(name: str, outcome: Outcome) -> None:
    """The prediction, and what interventions changed."""
    after = " after" if outcome.intervened else ""
    for when, guesses in ((" before", outcome.before), (after, outcome.prediction)):
        if guesses:
            log.info("%s%s: %s", name, when, ", ".join(guess.text for guess in guesses))
    if outcome.intervened:
        words = f"the output cannot be compared: {UNLIKE_OUTPUTS}"
        if outcome.largest_change is not None:
            words = f"the output changed by at most {outcome.largest_change:.4g}"
            if outcome.nonfinite > 0:
                became = "of its values became NaN or infinite, or ceased to be"
                words += f", and {outcome.nonfinite} {became}"
        log.info("%s: %s", name, words)


def _conclude(result: RunResult, unseen: Mapping[str, Mapping[str, str]], to_look: bool) -> None:
    """What gave no picture, what is missing, and on the last line what was written, what failed,
    and, if asked for, how to look at the run."""
    done = [image for image in result.images if image.error is None]
    words = []
    for what, layers in unseen.items():
        named = [f"{name} ({reason})" if reason else name for name, reason in layers.items()]
        words += [f"{what}: {listed(named, _NAMED)}"] if named else []
    if result.drew_nothing:
        reasons = "; ".join(words) or "no layer was taken"
        output.error(f"no picture was drawn; {reasons}", NOTHING_DRAWN)
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
        again = shlex.join(["featviz", "report", str(result.root), "--open"])
        line += f"; to look at them: {again}"
    log.info("%s", line)


# Several processes on one run


def shard_of_process() -> Shard | None:
    """The share that RANK and WORLD_SIZE (torchrun), or SLURM_PROCID and SLURM_NTASKS, name; None
    for a process that runs alone."""
    for names in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        given = [os.environ[name] for name in names if name in os.environ]
        if len(given) < len(names):
            continue
        index, count = (int(word) if re.fullmatch(r"[0-9]{1,9}", word) else -1 for word in given)
        if not 0 <= index < count:
            shown = " and ".join(f"{name}={quoted(os.environ[name], 20)}" for name in names)
            words = f"{shown} name no process of several: numbers begin with 0"
            raise UsageError(words, "start with torchrun or srun, or unset them")
        return Shard(index, count) if count > 1 else None
    return None


def _runs_in_torchrun() -> bool:
    return "WORLD_SIZE" in os.environ and shard_of_process() is not None
