"""The files that the stories work with: networks, weights, and images that are not
square."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from PIL import Image

NETS = Path(__file__).with_name("nets.py")

BAR = """
................
....RRRR........
....RRRR..GGGG..
....RRRR..GGGG..
....RRRR..GGGG..
....RRRR........
....RRRR.......B
..............BB
"""
DOTS = """
R.......R.......
..G.............
................
....WW..........
....WW.......G..
................
.............B..
R..............R
"""
COLOURS = {".": (0, 0, 0), "R": (255, 0, 0), "G": (0, 255, 0), "B": (0, 0, 255)}
COLOURS["W"] = (255, 255, 255)


def save_drawing(path: Path, drawing: str) -> None:
    """A picture whose pixels are the letters of a drawing."""
    rows = [[COLOURS[letter] for letter in line] for line in drawing.split()]
    Image.fromarray(np.array(rows, np.uint8)).save(path)


def furnish(folder: Path) -> None:
    """Put everything there."""
    shutil.copy(NETS, folder / "net.py")
    pictures = folder / "pics"
    pictures.mkdir()
    save_drawing(folder / "bar.png", BAR)
    save_drawing(folder / "pics" / "bar.png", BAR)
    save_drawing(folder / "pics" / "dots.png", DOTS)
