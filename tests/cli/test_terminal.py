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

pytestmark = pytest.mark.medium


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
    """Two images with such names, the second of which is broken."""
    folder = tmp_path / "photos"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), np.uint8)
    Image.fromarray(pixels).save(folder / f"{EVIL}.png", format="png")
    (folder / f"broken{EVIL}.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return folder


def assert_tame(done: Outcome) -> None:
    """A command printed nothing but printable characters and our own line ends."""
    for stream in (done.out, done.err):
        wild = {c for c in stream if not c.isprintable() and c != "\n"}
        assert not wild, stream
        assert "\nerror: forged" not in stream


def test_names_of_layers(featviz: Run, net: str) -> None:
    """They are escaped in tables, and JSON has them as they are."""
    done = featviz("layers", net, "--size", "12")
    assert_tame(done)
    assert SHOWN in done.out

    done = featviz("layers", net, "--size", "12", "--json")
    assert_tame(done)
    assert EVIL in {row["name"] for row in json.loads(done.out)["layers"]}


@pytest.fixture
def evil_run(featviz: Run, net: str, photos: Path, tmp_path: Path) -> Outcome:
    """A run of such layers on such images into `run`."""
    options = ("--layers", "*", "--size", "12", "--tensors", "npy", "-v")
    return featviz("run", net, photos, *options, "--out", tmp_path / "run")


def test_run_and_its_json(featviz: Run, net: str, photos: Path) -> None:
    """JSON lines have the names as they are."""
    done = featviz("run", net, photos, "--size", "12", "--json")
    assert_tame(done)
    images = {json.loads(line)["image"] for line in done.out.splitlines()}
    assert f"{EVIL}.png" in images


def test_what_a_run_says(evil_run: Outcome) -> None:
    """Failures and the summary have the names escaped."""
    assert evil_run.code == 3
    assert_tame(evil_run)
    assert SHOWN in evil_run.err


ESCAPED = [
    "layers NET --layers NOBODY",
    "run NET photos --size 12 --out other --dry-run",
    "sheet run --layers NOBODY",
]
"""Commands that print names for people."""
JSON = [
    "diff run run --json",
    "report run --json",
    "sheet run --layers NAME --out sheet.png --json",
    "merge run --out merged --json",
    "kernels NET --out kernels --json",
]


@pytest.mark.usefixtures("evil_run")
@pytest.mark.parametrize("line", [*ESCAPED, *JSON])
def test_what_reads_a_run(line: str, featviz: Run, net: str) -> None:
    """Every command that a run goes through prints names of images and layers tame, and
    those for people are escaped."""
    arguments = {"NET": net, "NAME": EVIL, "NOBODY": f"no{EVIL}"}
    done = featviz(*(arguments.get(word, word) for word in line.split()))
    assert_tame(done)
    if line in ESCAPED:
        assert SHOWN in done.out + done.err


@pytest.mark.usefixtures("evil_run")
def test_a_difference(featviz: Run, net: str, photos: Path) -> None:
    """The table has names of layers and images escaped."""
    options = ("--layers", "*", "--size", "12", "--seed", "1", "--out", "second", "-q")
    featviz("run", net, photos, *options)
    done = featviz("diff", "run", "second")
    assert_tame(done)
    assert SHOWN in done.out + done.err


@pytest.mark.usefixtures("evil_run")
def test_a_damaged_run(featviz: Run, tmp_path: Path) -> None:
    """The warning that an image is not complete has its name escaped."""
    (manifest,) = (tmp_path / "run").rglob("manifest.json")
    manifest.rename(manifest.with_name("stats.npz"))
    done = featviz("report", "run")
    assert_tame(done)
    assert SHOWN in done.err


@pytest.fixture
def latin(featviz: Run, tiny_file: Path, tmp_path: Path) -> tuple[object, ...]:
    """A run whose image and folder are named in Latin-1, as the command that made it."""
    photo = tmp_path / "photos" / os.fsdecode(b"caf\xe9.png")
    photo.parent.mkdir()
    Image.new("RGB", (12, 12)).save(photo, format="png")
    options = ("--layers", "Conv2d", "--size", "12", "--out", OUT)
    command = ("run", tiny_file, photo.parent, *options)
    assert featviz(*command).code == 0
    return command


OUT = os.fsdecode(b"out\xff")


@pytest.mark.usefixtures("latin")
@pytest.mark.parametrize(
    "command",
    [
        ("report", OUT, "--compare", OUT),
        ("diff", OUT, OUT),
        ("merge", OUT, "--out", "merged"),
    ],
    ids=["report", "diff", "merge"],
)
def test_a_name_that_is_not_utf8(command: tuple[str, ...], featviz: Run) -> None:
    """Every command that reads a run takes it."""
    assert featviz(*command).code == 0


@pytest.mark.usefixtures("latin")
def test_a_name_that_is_not_utf8_on_a_page(featviz: Run) -> None:
    """It is shown escaped, and linked as it is."""
    assert featviz("report", OUT, "--out", "report").code == 0
    page = Path("report/image-000.html").read_text("utf-8")
    assert r"caf\udce9.png" in page
    assert "../out%FF/caf" in page


def test_a_run_of_such_a_name_is_resumed(
    latin: tuple[object, ...], featviz: Run
) -> None:
    """Its image is known again."""
    done = featviz(*latin, "--resume")
    assert done.code == 0
    assert "(1 was complete before)" in done.err
    assert_tame(done)
