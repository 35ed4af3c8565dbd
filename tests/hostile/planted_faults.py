"""Faults that the harness's own test plants, by name, and the words by which each is found."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hostile_audit import MARKER
from PIL import Image

RAN = f"{{root}}/{MARKER}"
BYSTANDER, SECRET = "{root}/bystander/new", "{root}/secret/id_secret"


def _forks() -> None:
    if os.fork() == 0:
        os._exit(0)


def _writes_below(place: str, opened: Callable[..., int]) -> None:
    """By the descriptor of a folder; `opened` may be past the wrapper that tells the hook so."""
    folder = os.open(Path(place).parent, os.O_RDONLY)
    os.chdir(Path(place).parent.parent / "work")
    os.close(opened(Path(place).name, os.O_WRONLY | os.O_CREAT, dir_fd=folder))


def _imports(folder: str) -> None:
    sys.path.insert(0, folder)
    __import__("innocent")


def _loops() -> None:
    while True:
        pass


def _swallowed(place: str) -> None:
    try:
        subprocess.run(["touch", place], check=False)
    except Exception:
        return


def _encodes(place: str) -> None:
    words = base64.b64encode(Path(place).read_bytes()).decode()
    Path("page.html").write_text(f"<img src='data:;base64,{words}'>")


def _crops(place: str) -> None:
    """A piece of a secret picture, coloured."""
    with Image.open(place) as opened:
        opened.crop((5, 7, 30, 20)).convert("RGB").save("piece.png")


def _marks_up() -> None:
    from hostile_harness import MARKUP

    Path("page.html").write_text(f"<p>{MARKUP}</p>")


def _copies(place: str) -> None:
    Path("copy.bin").write_bytes(Path(place).read_bytes())


def _opens(place: str) -> None:
    Path(place).write_text("x")


def _below(place: str) -> None:
    _writes_below(place, os.open)


def _past(place: str) -> None:
    _writes_below(place, getattr(os.open, "__wrapped__", os.open))


def _links(place: str) -> None:
    Path("link.png").symlink_to(place)


def _connects() -> None:
    socket.create_connection(("127.0.0.1", 9), timeout=1)


OUTSIDE = "outside the destination"
FAULTS: dict[str, tuple[Callable[..., object], str, str]] = {
    "system": (lambda place: os.system(f"touch {place}"), RAN, "VIOLATION os.system"),
    "swallowed": (_swallowed, RAN, "VIOLATION subprocess.Popen"),
    "connects": (_connects, "", "VIOLATION socket"),
    "forks": (_forks, "", "VIOLATION os.fork"),
    "writes": (_opens, BYSTANDER, f"VIOLATION open: {OUTSIDE}"),
    "writes below": (_below, BYSTANDER, f"VIOLATION open: {OUTSIDE}"),
    "writes past": (_past, BYSTANDER, "MADE bystander/new"),
    "removes": (os.remove, "{root}/bystander/notes.txt", f"VIOLATION os.remove: {OUTSIDE}"),
    "links": (_links, SECRET, "LINK work/link.png was made"),
    "evaluates": (lambda: exec(f"{MARKER} = 1"), "", "VIOLATION compile: foreign source"),
    "imports": (_imports, "{given}", "VIOLATION compile: foreign code"),
    "loops": (_loops, "", "HANG"),
    "waits": (lambda: os.read(os.pipe()[0], 1), "", "HANG"),
    "swells": (lambda: bytearray(10**10), "", "TRACEBACK MemoryError"),
    "crashes": (os.abort, "", "SIGNAL 6"),
    "raises": (lambda: {}["oops"], "", "TRACEBACK KeyError"),
    "tells": (lambda place: print(Path(place).read_text()), SECRET, "LEAK the secret is on stdout"),
    "copies": (_copies, SECRET, "LEAK the secret is in work/copy.bin"),
    "copies pixels": (_copies, f"{SECRET}.png", "LEAK secret pixels are in work/copy.bin"),
    "encodes": (_encodes, SECRET, "LEAK the secret is in work/page.html"),
    "encodes pixels": (_encodes, f"{SECRET}.png", "LEAK the secret is in work/page.html"),
    "crops": (_crops, f"{SECRET}.png", "LEAK secret pixels are in work/piece.png"),
    "shows a title": (lambda: print("\x1b]0;title\x07"), "", "TERMINAL '\\x1b' on stdout"),
    "marks up": (_marks_up, "", "LEAK MARKUP of the input stands raw in work/page.html"),
    "fails in silence": (lambda: sys.exit(1), "", "0 error lines"),
    "well": (lambda: Path("fine.txt").write_text("fine"), "", ""),
}
"""What is done, with which place, and the words by which it is found."""


def plant(name: str, *places: str) -> int:
    """Do what the name says; an exit code."""
    try:
        FAULTS[name][0](*places)
    except SystemExit:
        return 1
    return 0
