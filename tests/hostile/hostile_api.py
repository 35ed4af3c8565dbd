"""Functions that the worker calls: planted faults for the harness's own test, and uses of the API.

Each takes strings, as from a command line.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    """Writes a file by the descriptor of its folder."""
    folder = os.open(Path(place).parent, os.O_RDONLY)
    os.close(os.open(Path(place).name, os.O_WRONLY | os.O_CREAT, dir_fd=folder))


def writes_past(place: str) -> None:
    """Writes a file by the descriptor of its folder in a way that does not say so to the hook."""
    opened = getattr(os.open, "__wrapped__", os.open)
    folder = os.open(Path(place).parent, os.O_RDONLY)
    os.chdir(Path(place).parent.parent / "work")
    os.close(opened(Path(place).name, os.O_WRONLY | os.O_CREAT, dir_fd=folder))


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


# Uses of the API that must mean something, or end in one FeatvizError ---------------------------


def _net() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()).eval()


def api_run(photo: str, **options: Any) -> None:
    """`featviz.run` with options that the command line would check."""
    import featviz

    options = {"out": Path("api-out"), **options}
    featviz.run(_net(), photo, **options)


def api_format(photo: str) -> None:
    """An unknown format."""
    api_run(photo, format="gif")


def api_pick(photo: str) -> None:
    """An unknown choice."""
    api_run(photo, max_maps=2, pick="best")


def api_tensors(photo: str) -> None:
    """An unknown kind of tensor files."""
    api_run(photo, tensors="npz")


def api_layers_of_nothing(photo: str) -> None:
    """A number for selectors."""
    api_run(photo, layers=5)


def api_no_image(photo: str) -> None:
    """No image at all, but a dict."""
    api_run({"a": photo})  # type: ignore[arg-type]


def api_null_in_path(photo: str) -> None:
    """A path that no system takes."""
    api_run(f"{photo}\0")


def api_scripted(photo: str) -> None:
    """A scripted module, which takes no hooks of Python."""
    import torch

    import featviz

    featviz.run(torch.jit.script(_net()), photo, out=Path("api-out"))


def api_picture(photo: str) -> None:
    """A PIL image in place of a path."""
    from PIL import Image

    with Image.open(photo) as opened:
        api_run(opened)  # type: ignore[arg-type]


def api_array(photo: str) -> None:
    """An array in place of a path."""
    import numpy as np
    from PIL import Image

    with Image.open(photo) as opened:
        api_run(np.asarray(opened))  # type: ignore[arg-type]


def api_class(photo: str) -> None:
    """A class in place of a selector."""
    from torch import nn

    api_run(photo, layers=nn.Conv2d)


def api_list(photo: str) -> None:
    """A list of selectors."""
    api_run(photo, layers=["Conv2d", "ReLU"])


def api_grid() -> None:
    """An array in place of a tensor."""
    import numpy as np

    import featviz

    featviz.grid(np.zeros((4, 8, 8), np.float32))
