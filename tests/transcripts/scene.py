"""The files that the stories work with: networks, weights, and images that are not
square."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
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
LINES = """
................
RRRRRRRRRRRR....
................
....GGGGGGGGGGGG
................
WWWWWWWWWWWWWWWW
................
........BBBBBBBB
"""
TINY = """
RR....
RR..G.
......
B....W
"""
TALL = """
R.....
R.G...
..G...
......
BB..W.
BB..W.
......
......
......
....RR
....RR
....RR
"""
COLOURS = {".": (0, 0, 0), "R": (255, 0, 0), "G": (0, 255, 0), "B": (0, 0, 255)}
COLOURS["W"] = (255, 255, 255)
CLASSES = "bar\ndot\nline\nring\ncross\n"

CONFIGS = {
    "whole": """model = "net.py:Small"
images = ["pics"]
preset = "none"
weights = "none"
layers = "pool"
out = "of-config"
""",
    "misspelt": 'layer = "pool"\n',
    "wrong": "padding = -1\n",
    "broken": "layers = pool\n",
    "other": 'fail_on = "dead>3"\n',
}
"""Values of options, by the name of the file."""


def furnish(folder: Path) -> None:
    """Put everything there."""
    shutil.copy(NETS, folder / "net.py")
    (folder / "classes.txt").write_text(CLASSES)
    for name, text in CONFIGS.items():
        (folder / f"{name}.toml").write_text(text)
    save_images(folder)
    save_arrays(folder)
    with nets(folder) as module:
        save_weights(folder, module)


def save_drawing(path: Path, drawing: str) -> None:
    """A picture whose pixels are the letters of a drawing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [[COLOURS[letter] for letter in line] for line in drawing.split()]
    Image.fromarray(np.array(rows, np.uint8)).save(path)


def save_clear_drawing(path: Path, drawing: str) -> None:
    """A picture that is transparent where the drawing is black."""
    save_drawing(path, drawing)
    with Image.open(path) as opened:
        pixels = np.array(opened.convert("RGBA"))
    pixels[(pixels[..., :3] == 0).all(axis=2), 3] = 0
    Image.fromarray(pixels).save(path)


def save_images(folder: Path) -> None:
    """Pictures of 8 by 16 pixels, alone, in a folder, in an archive, and by class; one
    that is cut off; a small one."""
    save_drawing(folder / "bar.png", BAR)
    save_drawing(folder / "tiny.png", TINY)
    for name, drawing in (("bar", BAR), ("dots", DOTS), ("lines", LINES)):
        save_drawing(folder / "pics" / f"{name}.png", drawing)
        save_drawing(folder / "sorted" / name[0] / f"{name}.png", drawing)
    save_drawing(folder / "mixed" / "bar.png", BAR)
    save_drawing(folder / "mixed" / "dots.png", DOTS)
    whole = (folder / "mixed" / "dots.png").read_bytes()
    (folder / "mixed" / "cut.png").write_bytes(whole[:60])
    (folder / "mixed" / "text.png").write_text("no picture")
    with zipfile.ZipFile(folder / "pics.zip", "w") as archive:
        for name in ("bar.png", "dots.png"):
            archive.write(folder / "pics" / name, f"in/{name}")
    (folder / "list.txt").write_text("pics/lines.png\nbar.png\n")
    save_drawing(folder / "tall.png", TALL)
    save_clear_drawing(folder / "clear.png", TINY)
    for name in ("a:b", "con", "two words", "é%"):
        save_drawing(folder / "strange" / f"{name}.png", TINY)
    for name in ("one", "two"):
        for number, drawing in enumerate((BAR, DOTS, LINES)):
            save_drawing(folder / "six" / f"{number}-{name}.png", drawing)
    for step, drawing in enumerate((BAR, DOTS, LINES)):
        save_drawing(folder / "film" / f"{step}.png", drawing)


def save_arrays(folder: Path) -> None:
    """Values of their own: one channel of 6 by 10, a volume, latent numbers, a mask."""
    rows, columns = np.mgrid[:6, :10].astype(np.float32)
    np.save(folder / "slope.npy", columns / 4 - rows / 2)
    np.save(folder / "volume.npy", np.arange(60, dtype=np.float32).reshape(3, 4, 5) / 8)
    np.save(folder / "latent.npy", np.array([[1, -2, 0.5, 0]], np.float32))
    deep = np.arange(60, dtype=np.uint16).reshape(6, 10) * 64
    np.save(folder / "deep.npy", deep)
    Image.fromarray(deep).save(folder / "deep.png")
    last = np.zeros((4, 5, 3), np.uint8)
    last[1, 2] = (255, 0, 51)
    np.save(folder / "last.npy", last)
    np.savez(folder / "two.npz", first=last, second=deep)
    np.savez(folder / "named.npz", first=last, image=deep)
    torch.save(torch.ones(1, 6, 10) / 4, folder / "quarter.pt")
    mask = np.zeros((1, 1, 8, 16), np.float32)
    mask[..., 4:12] = 1
    np.save(folder / "mask.npy", mask)


@contextmanager
def nets(folder: Path) -> Iterator[Any]:
    """The module `net.py` of a folder, under its name, which pickles of whole models
    hold."""
    spec = importlib.util.spec_from_file_location("net", folder / "net.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["net"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["net"]


def save_weights(folder: Path, nets: Any) -> None:
    """Weights of `net.py:Small` in some forms, a changed and a pruned one, and whole
    models."""
    from safetensors.torch import save_file

    model = nets.Small()
    weights = model.state_dict()
    torch.save(weights, folder / "base.pth")
    save_file(weights, folder / "base.safetensors")
    wrapped = {f"module.{name}": tensor for name, tensor in weights.items()}
    torch.save({"epoch": 3, "state_dict": wrapped}, folder / "wrapped.pth")
    averaged = {name: tensor / 2 for name, tensor in weights.items()}
    torch.save({"model": weights, "model_ema": averaged}, folder / "averaged.pth")
    body = {
        name: tensor for name, tensor in weights.items() if not name.startswith("head")
    }
    torch.save(body, folder / "headless.pth")
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    changed["mix.weight"][2] += 1 / 8
    torch.save(changed, folder / "changed.pth")
    kept = [0, 1, 3, 4]
    pruned = dict(weights)
    for name in ("mix.weight", "mix.bias", "far.weight", "far.bias"):
        pruned[name] = pruned[name][kept]
    for name in ("far.weight", "head.weight"):
        pruned[name] = pruned[name][:, kept]
    torch.save(pruned, folder / "pruned.pth")
    torch.save(nets.grey(), folder / "grey.pth")
    wide = nets.grey()
    with torch.no_grad():
        wide[0].weight[1] += 1 / 4
    torch.save(wide, folder / "grey-2.pth")
    torch.save(model, folder / "whole.pth")
    (folder / "junk.pth").write_text("no weights")
