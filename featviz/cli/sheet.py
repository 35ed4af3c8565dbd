"""The command `featviz sheet`."""

from __future__ import annotations

import logging
from pathlib import Path

from featviz.cli import output
from featviz.cli.options import Values, command, run_arguments
from featviz.options import read_from
from featviz.options.commands import SheetOptions
from featviz.text import counted

log = logging.getLogger(__name__)


# without --out the command writes a file, too, unlike the function in Python
@command(
    SheetOptions,
    arguments=[run_arguments("runs", metavar="RUN...")],
    out=Path("sheet.png"),
)
def sheet(values: Values) -> int:
    """Draw a figure of runs, or an animation: a column for each image, a row for each
    channel, layer and run.

    The tiles are those of the runs, and keep their scale and colours. If there is one
    image, its channels stand side by side, at most eight in a row. More than twelve
    images go on below. Each of several RUNs has its own rows, beside the name of
    its folder. Runs with --reduce or --overlay have one tile for each layer and
    image.

    An animation (.gif, .webp, .mp4) shows one image after the other, or the frames of a
    clip. If RUN is the folder of a featviz.Watcher, it shows the steps of the
    training.

    \b
    Examples:
      featviz sheet featviz-out --layers layer4 --channels varied:8
      featviz sheet resnet densenet --images 'c*' --width 8.5 --out models.pdf
      featviz sheet featviz-series --layers conv1 --out training.gif
    """
    from featviz.rundir.read import warn_of
    from featviz.sheets.sheets import make_sheet

    options = read_from(SheetOptions, dict(values))
    result = make_sheet(values["runs"], options)
    warn_of(result.left_out, behind=", and left out")
    if values["json"]:
        output.document(
            {
                "file": str(result.path),
                "images": result.images,
                "channels": result.channels,
                "frames": result.frames,
            }
        )
    else:
        layers = counted(result.layers, "layer")
        images = counted(len(result.images), "image")
        frames = f", {result.frames} frames" if result.frames > 1 else ""
        log.info("%s of %s%s in %s", layers, images, frames, result.path)
    return 0
