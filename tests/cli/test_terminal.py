"""Names from outside reach a terminal tame: no control character, no forged line, on no
stream."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from conftest import Outcome, Run
from PIL import Image

EVIL = "a\x1b]0;owned\x07\nerror: forged\u202eb\x9b31m"
SHOWN = r"a\x1b]0;owned\x07\nerror: forged\u202eb\x9b31m"
NET = f"""
from torch import nn

class Net(nn.Sequential):
    pass

def make():
    net = Net()
    net.add_module({EVIL!r}, nn.Conv2d(3, 4, 3))
    net.add_module("act" + {EVIL!r}, nn.ReLU())
    return net
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    """A model whose layers' names are attacks on a terminal."""
    (tmp_path / "evil_net.py").write_text(NET)
    return f"{tmp_path / 'evil_net.py'}:make"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two images with such names, one of which is broken."""
    folder = tmp_path / "photos"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), np.uint8)
    Image.fromarray(pixels).save(folder / f"{EVIL}.png", format="png")
    (folder / f"broken{EVIL}.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return folder


def check_tame(done: Outcome, *, named: bool = True) -> None:
    """Nothing but printable characters and our own line ends; the name is there,
    escaped."""
    for stream in (done.out, done.err):
        wild = {c for c in stream if not c.isprintable() and c != "\n"}
        assert not wild, (wild, stream)
        assert not [
            line for line in stream.split("\n") if line.startswith("error: forged")
        ]
    assert not named or SHOWN in done.out + done.err, (done.out, done.err)


def test_names_of_layers(featviz: Run, net: str, tmp_path: Path) -> None:
    """In tables and in JSON, whose strings are the names."""
    check_tame(featviz("layers", net, "--size", "12"))
    done = featviz("layers", net, "--size", "12", "--json")
    check_tame(done, named=False)
    assert EVIL in {row["name"] for row in json.loads(done.out)["layers"]}
    check_tame(featviz("layers", net, "--size", "12", "--layers", f"no{EVIL}"))
    done = featviz("kernels", net, "--out", tmp_path / "kernels", "--json")
    check_tame(done, named=False)
    assert EVIL in {row["layer"] for row in json.loads(done.out)["captures"]}


def test_run_and_what_reads_it(
    featviz: Run, net: str, photos: Path, tmp_path: Path
) -> None:
    """Every command that a run goes through, with names of images and of layers."""
    runs = [tmp_path / "one", tmp_path / "two"]
    for seed, out in enumerate(runs):
        command = ("run", net, photos, "--size", "12", "--layers", "*", "--seed", seed)
        done = featviz(*command, "--out", out, "--tensors", "npy", "-v")
        assert done.code == 3
        check_tame(done)
    check_tame(
        featviz(
            "run", net, photos, "--size", "12", "--out", tmp_path / "x", "--dry-run"
        )
    )
    done = featviz(
        "run", net, photos, "--size", "12", "--out", tmp_path / "y", "--json"
    )
    check_tame(done, named=False)
    assert {json.loads(line)["image"] for line in done.out.splitlines()} >= {
        f"{EVIL}.png"
    }
    check_tame(featviz("diff", *runs))
    check_tame(featviz("diff", *runs, "--json"), named=False)
    (folder,) = (path for path in runs[1].iterdir() if path.is_dir())
    (folder / "manifest.json").rename(folder / "stats.npz")
    check_tame(featviz("report", runs[1]))
    check_tame(featviz("report", runs[1], "--json"))
    check_tame(featviz("sheet", runs[1], "--layers", EVIL), named=False)
    check_tame(featviz("sheet", runs[0], "--layers", f"no{EVIL}"))
    check_tame(
        featviz(
            "sheet", runs[0], "--layers", EVIL, "--json", "--out", tmp_path / "s.png"
        ),
        named=False,
    )
    check_tame(featviz("merge", runs[1], "--out", tmp_path / "merged", "--json"))


def test_a_name_that_is_not_utf8(featviz: Run, tiny_file: Path, tmp_path: Path) -> None:
    """Works in run, report, sheet, diff and merge alike, on pages as in one file."""
    name = os.fsdecode(b"caf\xe9.png")
    photo = tmp_path / "photos" / name
    photo.parent.mkdir()
    Image.fromarray(np.zeros((12, 12, 3), np.uint8)).save(photo, format="png")
    out = tmp_path / os.fsdecode(b"out\xff")
    layers = ("--layers", "Conv2d", "--size", "12")
    assert featviz("run", tiny_file, photo.parent, *layers, "--out", out).code == 0
    assert featviz("report", out, "--out", tmp_path / "r").code == 0
    page = (tmp_path / "r" / "image-000.html").read_text("utf-8")
    assert r"caf\udce9.png" in page
    assert "../out%FF/caf" in page
    for command in (("report", out, "--compare", out), ("diff", out, out)):
        assert featviz(*command).code == 0
    assert featviz("merge", out, "--out", tmp_path / "merged").code == 0
    done = featviz("run", tiny_file, photo.parent, *layers, "--out", out, "--resume")
    assert done.code == 0
    assert "(1 was complete before)" in done.err
    check_tame(done, named=False)
