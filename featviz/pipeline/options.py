"""What the options of a run mean together, and the checks that need to know layouts and scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from featviz.drawing import colormap, normalize, tensorboard
from featviz.drawing.picture import check_format
from featviz.errors import UsageError
from featviz.files.urls import Url, is_url
from featviz.gradients import options as gradients
from featviz.images import decode
from featviz.layout.hints import parse_override
from featviz.options import DrawOptions, RunOptions


def at_place(out: Any) -> dict[str, Any]:
    """The field of RunOptions that says where the run is written, a folder or a URL.

    Raises:
        UsageError: it is a URL of a kind in which there can be no run.
    """
    if isinstance(out, str) and is_url(out):
        out = Url.of_run(out)
    return {"url": out} if isinstance(out, Url) else {"out": Path(out)}


def board_of(options: RunOptions) -> Path | None:
    """The folder of TensorBoard's events: in `tensorboard` one for each run."""
    if options.tensorboard is None:
        return None
    run = Path(options.url.name) if options.url is not None else options.out
    return tensorboard.run_folder(options.tensorboard, run)


def check_options(options: RunOptions) -> None:
    """Refuse bad options of a run before any work.

    Raises:
        UsageError: options exclude each other, or one has no meaning.
    """
    if options.resume and options.overwrite:
        raise UsageError("resume and overwrite exclude each other", "give one of them")
    if options.shard is not None and options.overwrite:
        raise UsageError(
            f"overwrite would remove what other shards write, and this is shard {options.shard}",
            "remove the run first, or name another folder with --out",
        )
    if options.overwrite and options.url is not None:
        raise UsageError(
            f"overwrite is for folders, and out is {options.url}",
            "name another URL, or remove the run there first (`aws s3 rm --recursive`)",
        )
    check_drawing(options.draw, options.tensorboard)
    decode.check_background(options.inputs.background)
    gradients.check_options(options.passes, options.draw)


def check_drawing(draw: DrawOptions, board: Path | None = None) -> None:
    """Refuse bad drawing options, those of `grid` and `kernels` as well.

    Args:
        board: the folder for TensorBoard's events, if there are to be any.

    Raises:
        UsageError: names the option, its value and what it takes.
    """
    draw.check()
    for text in draw.tensor_layout:
        parse_override(text)
    colormap.check_cmap(draw.cmap)
    normalize.parse_scale(draw.normalize)
    check_format(draw.format)
    if board is not None:
        tensorboard.require()
