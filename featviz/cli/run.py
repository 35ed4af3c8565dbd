"""`featviz run`."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from msgspec import structs

from featviz.cli import output
from featviz.cli.options import IMAGES, MODEL, ClickOption, Values, command
from featviz.errors import NOTHING_DRAWN, UsageError
from featviz.gradients.targets import check_options, for_drawing
from featviz.options import (
    OUTPUT,
    DrawOptions,
    ModelOptions,
    PassOptions,
    RunOptions,
    read_from,
)
from featviz.records import UNLIKE_OUTPUTS, Outcome, Shard
from featviz.rundir import RUN_FILE
from featviz.text import counted, gaps, listed, quoted

if TYPE_CHECKING:
    from featviz.run.results import ImageResult, RunResult

log = logging.getLogger(__name__)

_NAMED = 3  # a message names at most this many layers or images


def _passes(values: Values) -> PassOptions:
    """The options of the pass, completed for what is drawn, and checked.

    Raises:
        UsageError: options of the pass and of drawing contradict each other, or one of
            them would do nothing.
    """
    draw = read_from(DrawOptions, dict(values))
    passes = for_drawing(read_from(PassOptions, dict(values)), draw, values["seed"])
    draw.check()
    check_options(passes, draw)
    return passes


@command(
    RunOptions,
    ModelOptions,
    arguments=[MODEL, IMAGES],
    check=_passes,
    flags=[
        ClickOption(
            "Build an HTML report of the run, and open it.",
            "--open",
            group=OUTPUT,
            first=True,
        ),
        ClickOption(
            "Build an HTML report of the run.", "--report", group=OUTPUT, first=True
        ),
        ClickOption(
            "Print what would be written, and write nothing.", "--dry-run", group=OUTPUT
        ),
    ],
    json="one JSON line for each image",
    result=RUN_FILE,
)
def run(values: Values) -> int:
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

    options = read_from(RunOptions, dict(values), passes=_passes(values))
    source = values["source"]
    images = values["images"]
    shard = shard_of_process() if options.shard is None else None
    if values["dry_run"]:
        # only the first of several processes prints
        if shard is not None and shard.index > 0:
            return 0
        return _dry_run(source, images, options, values["json"])
    if shard is not None:
        options = _options_of_shard(options, shard, images)
    with_report = values["report"] or values["open"]
    with output.progress_bar() as advance:
        printer = RunPrinter(advance, as_json=values["json"])
        result = pipeline.run(source, images, options, printer.image)
    printer.end(result, name_report=not with_report)
    # only the shard that ends last has the results of the whole run
    if with_report and (result.whole or options.shard is None):
        from featviz.options.commands import ReportOptions
        from featviz.report import build_report

        page = build_report(options.folder, ReportOptions()).page
        output.log_written("report", page, values["open"])
    if shard is None:
        return result.exit_code
    return _exit_code_of_shard(result)


def _dry_run(
    source: ModelOptions, images: list[str], options: RunOptions, as_json: bool
) -> int:
    """Print what a run would do, as text or JSON, and return the exit code 0."""
    from featviz.run.dry_run import dry_run, render

    plan = dry_run(source, images, options)
    if as_json:
        output.document(plan)
    else:
        output.text(render(plan))
    return 0


class RunPrinter:
    """Prints the messages of `run`: about each image when it is done, and at the end of the
    run."""

    def __init__(
        self, advance: Callable[[int], None], as_json: bool = False, title: str = ""
    ) -> None:
        """Begin with no image.

        Args:
            advance: moves the progress bar by one image; takes the number of all images.
            as_json: whether to print a line of JSON for each image.
            title: begins messages about layers, to tell several runs apart.
        """
        self._advance = advance
        self._title = title
        self._json_line = as_json
        # layers without a picture in some image
        self._never_ran: dict[str, None] = {}
        self._skipped: dict[str, str] = {}

    def image(self, result: ImageResult, total: int) -> None:
        """Print the result of an image.

        Args:
            total: how many images there are in all.
        """
        self._advance(total)
        # collected by layer for `log_gaps`: if one image has no picture of a layer, usually
        # no image has
        self._never_ran |= dict.fromkeys(result.never_ran)
        self._skipped |= {skip.label: skip.reason for skip in result.skipped}
        if result.error is not None:
            output.image_error(result.name, result.error, result.hint)
        else:
            if output.waiting:
                output.print_waiting()
            if not result.kept and (total == 1 or log.isEnabledFor(logging.DEBUG)):
                _log_outcome(result.name, result.outcome)
        if self._json_line:
            output.document(_json_line(result), indent=None)

    def end(self, result: RunResult, name_report: bool) -> None:
        """Print the result of the run: which images and layers are missing, and in the last
        line what was written and what failed.

        Args:
            name_report: whether the last line names the command that makes a report.
        """
        self.log_gaps(result)
        complete = [image for image in result.images if image.error is None]
        if result.missing:
            missing = counted(len(result.missing), "image")
            log.warning(
                "interrupted: %s missing, %d complete; --resume goes on",
                missing,
                len(complete),
            )
        # if there are more shards than images
        if not result.images and not result.missing:
            log.info("no image is left for this shard")
        if not complete or result.drew_nothing:
            return
        images = counted(len(complete), "image")
        line = f"{counted(result.pictures, 'picture')} of {images} in {result.root}"
        kept = sum(image.kept for image in complete)
        if kept:
            line += f" ({kept} {'was' if kept == 1 else 'were'} complete before)"
        if result.failures:
            failed = counted(len(result.failures), "image")
            names = listed([image.name for image in result.failures], _NAMED)
            line += f"; {failed} failed: {names} (see run.json)"
        if name_report:
            line += f"; {output.to_look_at('them', result.root, '--open')}"
        log.info("%s", line)

    def log_gaps(self, result: RunResult) -> None:
        """Name the layers without a picture of some image: in warnings, or in an error if the
        run has no picture at all."""
        lines = gaps(self._skipped, self._never_ran)
        if result.drew_nothing:
            reasons = "; ".join(lines) or "no layer was taken"
            message = f"{self._title}no picture was drawn; {reasons}"
            output.error(message, NOTHING_DRAWN)
            return
        for line in lines:
            log.warning("%s%s", self._title, line)


def _json_line(result: ImageResult) -> dict[str, Any]:
    """The content of an image's JSON line; for an image that failed only the error."""
    if result.error is not None:
        return {"image": result.name, "error": result.error}
    line: dict[str, Any] = {
        "image": result.name,
        "folder": result.folder,
        "files": [capture.file for capture in result.rows],
        "skipped": len(result.skipped),
        "never_ran": list(result.never_ran),
        "prediction": [asdict(score) for score in result.outcome.prediction],
        "detections": [asdict(box) for box in result.outcome.detections],
    }
    if result.outcome.intervened:
        line["effect"] = result.outcome.effect
    if result.kept:
        line["kept"] = True
    return line


def _log_outcome(name: str, outcome: Outcome) -> None:
    """Log the prediction for an image, and how much interventions changed the output."""
    after = f"{name} after" if outcome.intervened else name
    for title, scores in (
        (f"{name} before", outcome.before),
        (after, outcome.prediction),
    ):
        if scores:
            log.info("%s: %s", title, ", ".join(score.text for score in scores))
    if not outcome.intervened:
        return
    if outcome.largest_change is None:
        log.info("%s: the output cannot be compared: %s", name, UNLIKE_OUTPUTS)
        return
    change = f"the output changed by at most {outcome.largest_change:.4g}"
    if outcome.nonfinite > 0:
        change += (
            f", and {outcome.nonfinite} of its values became NaN or infinite, or ceased"
            " to be"
        )
    log.info("%s: %s", name, change)


# Several processes on one run


def shard_of_process() -> Shard | None:
    """The shard of this process, from the environment: RANK and WORLD_SIZE (of torchrun), or
    SLURM_PROCID and SLURM_NTASKS. None if this is the only process.

    Raises:
        UsageError: the variables are not numbers, or the first is not below the second.
    """
    # torchrun first: in a job of SLURM, SLURM's variables count the launchers of torchrun
    for index_name, count_name in (
        ("RANK", "WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
    ):
        # both are needed: RANK by itself may be somebody else's variable
        if index_name not in os.environ or count_name not in os.environ:
            continue
        index = _number_in(index_name)
        count = _number_in(count_name)
        if not 0 <= index < count:
            index_text = f"{index_name}={quoted(os.environ[index_name], 20)}"
            count_text = f"{count_name}={quoted(os.environ[count_name], 20)}"
            raise UsageError(
                f"{index_text} and {count_text} name no process of several: numbers begin"
                " with 0",
                "start with torchrun or srun, or unset them",
            )
        return Shard(index, count) if count > 1 else None
    return None


def _number_in(name: str) -> int:
    """The number in a variable of the environment, which must be set; -1 if its text is not
    a number."""
    text = os.environ[name]
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else -1


def _options_of_shard(
    options: RunOptions, shard: Shard, images: list[str]
) -> RunOptions:
    """The options of a run with a shard, for one of several processes.

    Raises:
        UsageError: the images are listed on stdin, which the processes of torchrun
            cannot divide.
    """
    if "-" in images and _runs_in_torchrun():
        raise UsageError(
            "- lists images on stdin, which the processes of torchrun cannot divide",
            "give a folder, or start each process with its own list",
        )
    log.info("this process draws shard %s of the images", shard)
    return structs.replace(options, shard=shard)


def _exit_code_of_shard(result: RunResult) -> int:
    """The exit code of one of several processes. torchrun ends all processes when one fails.
    So failed images are reported only by the process that ends last, and it reports those
    of all processes."""
    only_images_failed = result.failures and not (result.missing or result.interrupted)
    if only_images_failed and not result.whole and _runs_in_torchrun():
        return 0
    if result.exit_code == 0 and result.whole and result.all_failures:
        return 3
    return result.exit_code


def _runs_in_torchrun() -> bool:
    return "WORLD_SIZE" in os.environ and shard_of_process() is not None
