"""Functions that the worker calls: planted faults for the harness's own test, and uses of the API.

Each takes strings, as from a command line.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from hostile_audit import MARKER


def system(place: str) -> None:
    """Starts a program."""
    os.system(f"touch {place}")


def swallowed(place: str) -> None:
    """Starts a program, and says nothing of its failure."""
    try:
        subprocess.run(["touch", place], check=False)
    except Exception:
        return


def connects() -> None:
    """Opens a connection."""
    socket.create_connection(("127.0.0.1", 9), timeout=1)


def forks() -> None:
    """Makes a process."""
    if os.fork() == 0:
        os._exit(0)


def writes(place: str) -> None:
    """Writes a file."""
    Path(place).write_text("x")


def writes_below(place: str) -> None:
    """Writes a file by the descriptor of its folder, which the hook does not see."""
    folder = os.open(Path(place).parent, os.O_RDONLY)
    os.close(os.open(Path(place).name, os.O_WRONLY | os.O_CREAT, dir_fd=folder))


def removes(place: str) -> None:
    """Removes a file."""
    Path(place).unlink()


def links(place: str) -> None:
    """Leaves a link in the destination."""
    Path("link.png").symlink_to(place)


def evaluates() -> None:
    """Runs code that came with an input."""
    exec(f"{MARKER} = 1")


def imports(folder: str) -> None:
    """Imports a module that came with an input."""
    sys.path.insert(0, folder)
    __import__("innocent")


def loops() -> None:
    """Never ends."""
    while True:
        pass


def waits() -> None:
    """Never ends, and does nothing."""
    read, _ = os.pipe()
    os.read(read, 1)


def swells() -> None:
    """Asks for 10 GB."""
    bytearray(10**10)


def crashes() -> None:
    """Ends by a signal."""
    os.abort()


def raises() -> None:
    """Ends in a traceback."""
    raise KeyError("oops")


def tells(place: str) -> None:
    """Shows a secret on stdout."""
    print(Path(place).read_text())


def copies(place: str) -> None:
    """Copies a secret into the destination."""
    Path("copy.bin").write_bytes(Path(place).read_bytes())


def encodes(place: str) -> None:
    """Copies a secret into a page, as base64."""
    import base64

    words = base64.b64encode(Path(place).read_bytes()).decode()
    Path("page.html").write_text(f"<img src='data:;base64,{words}'>")


def crops(place: str) -> None:
    """Copies a piece of a secret picture, and colours it."""
    from PIL import Image

    with Image.open(place) as opened:
        opened.crop((5, 7, 30, 20)).convert("RGB").save("piece.png")


def shows_title() -> None:
    """Sets the terminal's title."""
    print("\x1b]0;title\x07")


def marks_up() -> None:
    """Writes markup as it came."""
    from hostile_harness import MARKUP

    Path("page.html").write_text(f"<p>{MARKUP}</p>")


def says_nothing() -> None:
    """Fails without an error line."""
    sys.exit(1)


def well() -> None:
    """Does what it should."""
    Path("fine.txt").write_text("fine")
