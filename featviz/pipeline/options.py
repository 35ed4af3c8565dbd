"""The options of `run`, and the checks that need to know layouts, colormaps and scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from featviz.drawing import colormap, normalize, tensorboard
from featviz.drawing.picture import check_format
from featviz.files.urls import Url, is_url
from featviz.gradients import options as gradients
from featviz.gradients import pairs
from featviz.images import decode
from featviz.layout.overrides import parse_override
from featviz.models.preprocess import InputOptions
from featviz.records import Count, DrawOptions, Limits, PassOptions, Shard, Within
from featviz.records.checking import check

_WITH_URL = {
    "--overwrite": "name another URL, or remove the run there first (`aws s3 rm --recursive`)",
    "--durable": "leave it out: a store answers when it has an object",
    "--archive": "write the archive to a file, and copy it there (`aws s3 cp`)",
}
"""What to do instead of options that a run below a URL does not take."""


@dataclass(frozen=True)
class RunOptions:
    """All options of `run` beside the model and the images."""

    layers: str | None = None
    """Selectors; None takes one layer for each stage."""
    out: Path = Path("featviz-out")
    url: Url | None = None
    """Write the run below this URL of an object store, and leave no folder."""
    overwrite: bool = False
    resume: bool = False
    """Go on with the run that `out` holds, or that was to become `archive`."""
    verify: bool = False
    """With `resume`: keep only images all of whose files have their checksums."""
    prune: bool = False
    """With `resume`: remove images that are no longer among the inputs."""
    durable: bool = False
    """An image gets its name when the disk has all of its files."""
    wait: Annotated[float, Within(0, hint="give seconds")] = 0.0
    """Seconds to wait for another process that writes into `out`."""
    archive: Path | None = None
    """Pack the run into this zip file, and leave no folder."""
    nul_separated: bool = False
    """`-` reads NUL-separated paths."""
    fail_fast: bool = False
    """Stop at the first image that fails."""
    jobs: Count | None = None
    """Encoder threads; None takes a quarter of the cores, at least two."""
    tensorboard: Path | None = None
    """Folder for TensorBoard's runs."""
    step: Annotated[int, Within(0)] | None = None
    """The training step of the model, for TensorBoard."""
    limits: Limits = field(default_factory=Limits)
    shard: Shard | None = None
    """The share of the images that this process takes; None takes all, or torchrun's share."""
    draw: DrawOptions = field(default_factory=DrawOptions)
    inputs: InputOptions = field(default_factory=InputOptions)
    passes: PassOptions = field(default_factory=PassOptions)

    @property
    def target(self) -> Path | Url:
        """Where the user finds the run."""
        return self.url or self.archive or self.out

    @property
    def board(self) -> Path | None:
        """The folder of TensorBoard's events: in `tensorboard` one for each run, but all steps of a
        training are in `tensorboard` itself."""
        if self.tensorboard is None or self.step is not None:
            return self.tensorboard
        run = Path(self.url.name) if self.url is not None else self.archive or self.out
        return tensorboard.run_folder(self.tensorboard, run)

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Options that exclude each other, as the message and the hint of an error."""
        if self.resume and self.overwrite:
            yield "--resume and --overwrite exclude each other", "give one of them"
        for name, given in (("--verify", self.verify), ("--prune", self.prune)):
            if given and not self.resume:
                yield f"{name} is for --resume", "add it, or leave this out"
        of_folders = {"--overwrite": self.overwrite, "--durable": self.durable}
        for name, given in {**of_folders, "--archive": self.archive is not None}.items():
            if given and self.url is not None:
                yield f"{name} is for folders, and --out is {self.url}", _WITH_URL[name]
        if self.step is not None and self.tensorboard is None:
            yield "--step is for --tensorboard", "add it, or leave this out"
        if self.draw.weighs and self.passes.capture != pairs.CAPTURE:
            yield (
                f"--reduce {self.draw.reduce} is made of a layer's output and its gradient, and "
                f"--capture says {','.join(self.passes.capture)}",
                "leave --capture out",
            )


def at_place(out: str | Path | Url) -> dict[str, Any]:
    """The field of RunOptions that says where the run is written, a folder or a URL.

    Raises:
        UsageError: it is a URL of a kind in which there can be no run.
    """
    if isinstance(out, str) and is_url(out):
        out = Url.of_run(out)
    return {"url": out} if isinstance(out, Url) else {"out": Path(out)}


def check_options(options: RunOptions) -> None:
    """Refuse bad options of a run before any work.

    Raises:
        UsageError: names the option, its value and what it takes.
    """
    check(options)
    check_drawing(options.draw, options.tensorboard)
    decode.check_background(options.inputs.background)
    gradients.check_options(options.passes)


def check_drawing(draw: DrawOptions, board: Path | None = None) -> None:
    """Refuse bad drawing options, those of `grid` and `kernels` as well.

    Args:
        board: the folder for TensorBoard's events, if there are to be any.

    Raises:
        UsageError: names the option, its value and what it takes.
    """
    check(draw)
    for text in draw.tensor_layout:
        parse_override(text)
    colormap.check_cmap(draw.cmap)
    normalize.parse_scale(draw.normalize)
    check_format(draw.format)
    if board is not None:
        tensorboard.require()
