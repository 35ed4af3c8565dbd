"""Pictures in a terminal: by its graphics protocol where there is one, else in blocks of colour."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from featviz.text import by, printable

if TYPE_CHECKING:
    from rich.text import Text

    from featviz.inspection.look import LookResult
    from featviz.inspection.shown import ShownLayer
    from featviz.records import Bytes

_TILE, _INPUT = 18, 24
"""Columns of a tile and of the input at most."""
_WIDEST = 120
"""Columns of the page's picture at most, and of a row of tiles."""


def show(result: LookResult) -> None:
    """Show a page of `look` on the terminal that stdout is; one without colours shows none."""
    from PIL import Image
    from rich.console import Console

    console, graphics = Console(highlight=False), _graphics()
    if graphics is not None:
        console.print(graphics(Image.fromarray(result.picture), min(console.width, _WIDEST)))
        return
    if console.color_system is None or console.no_color:
        return
    for block in blocks(result, min(console.width, _WIDEST)):
        console.print(block)


def _graphics() -> Any:
    """What draws a picture by the terminal's own protocol (sixel, kitty); None where the terminal
    has none, or textual-image is not installed, which asks it."""
    if find_spec("textual_image") is None or not sys.stdin.isatty():
        return None
    from textual_image.renderable import Image, SixelImage, TGPImage

    return Image if Image in (SixelImage, TGPImage) else None


def blocks(result: LookResult, width: int) -> Iterator[Text]:
    """The page as lines of text: two pixels, one above the other, are a half block in two colours.

    Args:
        width: columns of the terminal.
    """
    from rich.text import Text

    yield Text.assemble((printable(result.model), "bold"), f"  {printable(result.image)}")
    yield from _lines([result.shown], min(width, _INPUT))
    for guess in result.prediction:
        yield Text.assemble(
            ("█" * round(20 * guess.probability)).ljust(20, "░"), f" {printable(guess.words)}"
        )
    for row in result.layers:
        yield Text()
        yield from _row(row, width)


def _row(row: ShownLayer, width: int) -> Iterator[Text]:
    from rich.text import Text

    words = f"  {printable(row.type)} {by(row.shape)}"
    yield Text.assemble((printable(row.layer or row.type), "bold"), words)
    if row.strip:
        yield from _lines([row.tiles[0][:1]], width)
        return
    across = min(_TILE, max(4, (width + 1) // len(row.tiles) - 1))
    fitting = row.tiles[: max(1, (width + 1) // (across + 1))]
    yield from _lines(fitting, across)
    yield Text(" ".join(str(c).ljust(across)[:across] for c in row.channels[: len(fitting)]))


def _lines(pictures: Sequence[Bytes], across: int) -> Iterator[Text]:
    """Pictures of one size side by side, each so many columns wide."""
    from PIL import Image
    from rich.text import Text

    height, width = pictures[0].shape[:2]
    down = max(2, round(across * height / width))
    down += down % 2
    small = [
        Image.fromarray(picture).resize((across, down), Image.Resampling.BOX)
        for picture in pictures
    ]
    for y in range(0, down, 2):
        line = Text()
        for place, picture in enumerate(small):
            line.append(" " if place else "")
            for x in range(across):
                above, below = (picture.getpixel((x, at)) for at in (y, y + 1))
                line.append("▀", f"{_rgb(above)} on {_rgb(below)}")
        yield line


def _rgb(pixel: Any) -> str:
    red, green, blue = pixel
    return f"rgb({red},{green},{blue})"
