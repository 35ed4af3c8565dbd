"""Faults that the harness's own test plants, by name, and the words by which each is
found."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Callable
from pathlib import Path

from hostile_audit import MARKER
from PIL import Image

RAN = f"{{root}}/{MARKER}"
BYSTANDER = "{root}/bystander/new"
SECRET = "{root}/secret/id_secret"


def _imports(folder: str) -> None:
    sys.path.insert(0, folder)
    __import__("innocent")


def _loops() -> None:
    while True:
        pass


def _encodes(place: str) -> None:
    words = base64.b64encode(Path(place).read_bytes()).decode()
    Path("page.html").write_text(f"<img src='data:;base64,{words}'>")


def _crops(place: str) -> None:
    with Image.open(place) as opened:
        opened.crop((5, 7, 30, 20)).convert("RGB").save("piece.png")


def _past(place: str) -> None:
    """By the descriptor of a folder, of which the hook does not hear."""
    folder = os.open(Path(place).parent, os.O_RDONLY)
    os.close(os.open(Path(place).name, os.O_WRONLY | os.O_CREAT, dir_fd=folder))


OUTSIDE = "outside the destination"
SPOKEN = "LEAK the secret is"
WRITES = f"VIOLATION open: {OUTSIDE}"
FAULTS: dict[str, tuple[Callable[..., object], str, str]] = {
    "system": (lambda at: os.system(f"touch {at}"), RAN, "VIOLATION os.system"),
    "writes": (lambda at: Path(at).write_text("x"), BYSTANDER, WRITES),
    "writes past": (_past, BYSTANDER, "MADE bystander/new"),
    "links": (
        lambda at: Path("link.png").symlink_to(at),
        SECRET,
        "LINK work/link.png was made",
    ),
    "evaluates": (
        lambda: exec(f"{MARKER} = 1"),
        "",
        "VIOLATION compile: foreign source",
    ),
    "imports": (_imports, "{given}", "VIOLATION compile: foreign code"),
    "loops": (_loops, "", "HANG"),
    "swells": (lambda: bytearray(10**10), "", "TRACEBACK MemoryError"),
    "crashes": (os.abort, "", "SIGNAL 6"),
    "raises": (lambda: {}["oops"], "", "TRACEBACK KeyError"),
    "tells": (lambda at: print(Path(at).read_text()), SECRET, f"{SPOKEN} on stdout"),
    "encodes": (_encodes, SECRET, f"{SPOKEN} in work/page.html"),
    "crops": (_crops, f"{SECRET}.png", "LEAK secret pixels are in work/piece.png"),
    "shows a title": (
        lambda: print("\x1b]0;title\x07"),
        "",
        "TERMINAL '\\x1b' on stdout",
    ),
    "marks up": (
        lambda: Path("page.html").write_text(f"<p onerror={MARKER}()>"),
        "",
        "LEAK MARKUP of the input stands raw in work/page.html",
    ),
    "fails in silence": (lambda: sys.exit(1), "", "0 error lines"),
    "well": (lambda: Path("fine.txt").write_text("fine"), "", ""),
}
"""What is done, with which place, and the words by which it is found."""


def plant(name: str, *places: str) -> int:
    try:
        FAULTS[name][0](*places)
    except SystemExit:
        return 1
    return 0
