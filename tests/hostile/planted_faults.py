"""Faults that the harness's own test plants, by name, and the message by which each is
found."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hostile_audit import MARKER
from PIL import Image

RAN = f"{{root}}/{MARKER}"
BYSTANDER = "{root}/bystander/new"
SECRET = "{root}/secret/id_secret"
PAGE = Path("page.html")


def system(path: str) -> None:
    os.system(f"touch {path}")


def write(path: str) -> None:
    Path(path).write_text("x")


def write_in_folder(path: str) -> None:
    """By the descriptor of a folder, of which the hook does not hear."""
    folder = os.open(Path(path).parent, os.O_RDONLY)
    os.close(os.open(Path(path).name, os.O_WRONLY | os.O_CREAT, dir_fd=folder))


def link(path: str) -> None:
    Path("link.png").symlink_to(path)


def evaluate() -> None:
    exec(f"{MARKER} = 1")


def import_innocent(folder: str) -> None:
    sys.path.insert(0, folder)
    __import__("innocent")


def loop() -> None:
    while True:
        pass


def swell() -> None:
    bytearray(10**10)


def raise_error() -> None:
    raise KeyError("oops")


def tell(path: str) -> None:
    print(Path(path).read_text())


def encode(path: str) -> None:
    data = base64.b64encode(Path(path).read_bytes()).decode()
    PAGE.write_text(f"<img src='data:;base64,{data}'>")


def crop(path: str) -> None:
    with Image.open(path) as opened:
        opened.crop((5, 7, 30, 20)).convert("RGB").save("piece.png")


def show_title() -> None:
    print("\x1b]0;title\x07")


def mark_up() -> None:
    PAGE.write_text(f"<p onerror={MARKER}()>")


def fail_in_silence() -> None:
    sys.exit(1)


def well() -> None:
    """No fault."""
    Path("fine.txt").write_text("fine")


class Fault(NamedTuple):
    """Something that a command must not do."""

    function: Callable[..., None]
    message: str
    """By which it is found."""
    path: str = ""
    """What is read, written or imported."""

    @property
    def arguments(self) -> list[str]:
        """Of `plant`."""
        return [self.function.__name__, *self.path.split()]


OUTSIDE = "outside the destination"
MARKUP = "LEAK MARKUP of the input stands raw in work/page.html"
FAULTS = {
    "system": Fault(system, "VIOLATION os.system", RAN),
    "writes": Fault(write, f"VIOLATION open: {OUTSIDE}", BYSTANDER),
    "writes past": Fault(write_in_folder, "MADE bystander/new", BYSTANDER),
    "links": Fault(link, "LINK work/link.png was made", SECRET),
    "evaluates": Fault(evaluate, "VIOLATION compile: foreign source"),
    "imports": Fault(import_innocent, "VIOLATION compile: foreign code", "{given}"),
    "loops": Fault(loop, "HANG"),
    "swells": Fault(swell, "TRACEBACK MemoryError"),
    "crashes": Fault(os.abort, "SIGNAL 6"),
    "raises": Fault(raise_error, "TRACEBACK KeyError"),
    "tells": Fault(tell, "LEAK the secret is on stdout", SECRET),
    "encodes": Fault(encode, "LEAK the secret is in work/page.html", SECRET),
    "crops": Fault(crop, "LEAK secret pixels are in work/piece.png", f"{SECRET}.png"),
    "shows a title": Fault(show_title, "TERMINAL '\\x1b' on stdout"),
    "marks up": Fault(mark_up, MARKUP),
    "fails in silence": Fault(fail_in_silence, "0 error lines"),
}
FUNCTIONS = {fault.function.__name__: fault.function for fault in FAULTS.values()}
FUNCTIONS["well"] = well


def plant(name: str, *paths: str) -> int:
    try:
        FUNCTIONS[name](*paths)
    except SystemExit:
        return 1
    return 0
