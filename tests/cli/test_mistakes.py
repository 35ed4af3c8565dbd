"""What people type by mistake: each with the message and the hint that it gets.

The folder of `here` holds `model.pth` (a Sequential of b1, b2, b3 and relu), its
weights, `net.py` with the class Net, `cat.jpg`, a folder `photos`, and empty files."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Run
from PIL import Image
from rundirs import RUN_RECORD
from runs import tree
from torch import nn

from .outcomes import apart

pytestmark = pytest.mark.medium


NET = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3))
class Wrapped(nn.Module):
    def __init__(self, width=4, depth=1):
        super().__init__()
        self.backbone = nn.ModuleDict({"stem": nn.Conv2d(3, width, 3)})
    def forward(self, x):
        return self.backbone["stem"](x)
"""

RUN = "run model.pth cat.jpg"

COMMANDS = [
    (
        "rum resnet18 cat.jpg",
        "No such command 'rum'",
        "did you mean run? featviz run resnet18 cat",
    ),
    (
        "frobnicate",
        "No such command 'frobnicate'",
        "--help describes them: look, run, report",
    ),
    (
        "model.pth cat.jpg",
        "No such command",
        "did you mean run? featviz run model.pth cat.jpg",
    ),
    (
        "LOOK model.pth cat.jpg",
        "No such command 'LOOK'",
        "did you mean look? featviz look model.pth cat.jpg",
    ),
    ("version", "No such command", "did you mean --version? featviz --version"),
    (
        "--verison",
        "No such option '--verison'",
        "did you mean --version? featviz --version",
    ),
    (
        "--layers b1 run model.pth cat.jpg",
        "No such option '--layers'",
        "featviz --help lists all",
    ),
]

OPTIONS = [
    (f"{RUN} --edit conv1:grad*2", "--edit grad does nothing", "--capture output,grad"),
    (
        f"{RUN} --layer b1",
        "No such option '--layer'",
        f"--layers? featviz {RUN} --layers b1",
    ),
    (
        f"{RUN} -layers=b1",
        "No such option '-l'",
        f"did you mean --layers? featviz {RUN} --layers=b1",
    ),
    (
        f"{RUN} --max_slices 3",
        "No such option",
        f"--max-slices? featviz {RUN} --max-slices 3",
    ),
    (
        f"{RUN} --gpu",
        "No such option '--gpu'",
        f"--device=cuda? featviz {RUN} --device=cuda",
    ),
    # the beginning of one option alone, and of three
    (
        f"{RUN} --rep",
        "No such option '--rep'",
        f"did you mean --report? featviz {RUN} --report",
    ),
    (
        f"{RUN} --tens npy",
        "No such option '--tens'",
        f"did you mean --tensors? featviz {RUN} --tensors npy",
    ),
    # not --trust
    (f"{RUN} --first 4", "No such option", "featviz run --help-all lists all"),
    (f"{RUN} --trus", "No such option '--trus'", "featviz run --help-all lists all"),
    (
        "merge photos --ou x",
        "No such option '--ou'",
        "did you mean --out? featviz merge photos",
    ),
    (
        f"{RUN} --norm layer",
        "No such option '--norm'",
        f"--normalize? featviz {RUN} --normalize",
    ),
    (f"{RUN} --dpi 3", "No such option '--dpi'", "featviz run --help-all lists all"),
    (
        "audit model.pth cat.jpg --fail-on 'dead>5%' --ovewrite",
        "No such option '--ovewrite'",
        "featviz audit model.pth cat.jpg --fail-on 'dead>5%' --overwrite",
    ),
]

PLACES = [
    ("layers", "featviz layers needs MODEL", "featviz layers --help has examples"),
    (
        "run model.pth",
        "featviz run needs IMAGE",
        "model: featviz run model.pth photo.jpg",
    ),
    (
        "report nope",
        "Directory 'nope' does not exist",
        "the current folder has no 'nope'",
    ),
    (
        "report ran --compare nope",
        "Directory 'nope' does not exist",
        "the current folder has no 'nope'",
    ),
    (
        "report ran --kernels nope",
        "Directory 'nope' does not exist",
        "the current folder has no 'nope'",
    ),
    (
        "report ran --exemplars nope",
        "Directory 'nope' does not exist",
        "the current folder has no 'nope'",
    ),
    (
        "report ran --audit nope",
        "Directory 'nope' does not exist",
        "the current folder has no 'nope'",
    ),
    ("diff ran", "featviz diff needs NEW", "featviz diff --help has examples"),
    (
        "look net.py:Net model.pth cat.jpg --maps 3",
        "'model.pth' is a file of a model",
        "featviz look net.py:Net cat.jpg --maps 3 --weights model.pth",
    ),
    # what stands behind -- is no option
    (
        "look net.py:Net -- model.pth cat.jpg",
        "'model.pth' is a file of a model",
        "featviz look net.py:Net --weights model.pth -- cat.jpg",
    ),
    (
        "look weights.pth cat.jpg --arch MyNet",
        "named 'MyNet'",
        "or FILE.py:MyNet for a class",
    ),
    (
        f"{RUN} --layers b1 b2",
        "no image 'b2'",
        f"a list has commas: featviz {RUN} --layers b1,b2",
    ),
    (
        "run model.pth --layers b1 b2 cat.jpg",
        "no image 'b2'",
        "a list has commas: featviz run model.pth --layers b1,b2 cat.jpg",
    ),
    (
        f"{RUN} --size 8 8 -q",
        "no image '8'",
        f"a list has commas: featviz {RUN} --size 8,8 -q",
    ),
    ("run model.pth --layers b1 gone.jpg", "no image 'gone.jpg'", "check the path"),
    (
        "run model.pth my cat.jpg",
        "no image 'my'",
        "in quotes: featviz run model.pth 'my cat.jpg'",
    ),
    (
        "run cat.jpg model.pth --size 9",
        "MODEL 'cat.jpg' is an image",
        "MODEL comes first: featviz run model.pth cat.jpg --size 9",
    ),
    (
        "run CAT.JPG net.py:Net",
        "MODEL 'CAT.JPG' is an image",
        "MODEL comes first: featviz run net.py:Net CAT.JPG",
    ),
    (
        "run photos model.pth",
        "MODEL 'photos' is a folder of images",
        "MODEL comes first: featviz run model.pth photos",
    ),
    (
        "run Nett W.PTH cat.jpg",
        "'W.PTH' is a file of a model",
        "featviz run Nett cat.jpg --weights W.PTH",
    ),
    (
        "report photos cat.jpg",
        "Got unexpected extra argument (cat.jpg)",
        "featviz report --help lists all options",
    ),
]

MODELS = [
    (
        "run resnt18 cat.jpg",
        "or file named 'resnt18'",
        "? featviz run resnet18 cat.jpg",
    ),
    (
        "run RESNET18 cat.jpg",
        "or file named 'RESNET18'",
        "? featviz run resnet18 cat.jpg",
    ),
    (
        "run modle.pth cat.jpg",
        "no model file 'modle.pth'",
        "featviz run model.pth cat.jpg",
    ),
    ("run org/net cat.jpg", "no model file 'org/net'", "hf download org/net"),
    (
        "run net.py cat.jpg",
        "'net.py' is code",
        "mean net.py:Wrapped, net.py:Net? featviz run net.py:Wrapped cat.jpg",
    ),
    (
        "look weights.pth cat.jpg --arch net",
        "or file named 'net'",
        "net.py:Net? featviz look weights.pth cat.jpg --arch net.py:Wrapped",
    ),
    (
        "run weights.pth cat.jpg --arch net.Net --out 'my maps'",
        "no torchvision model or file named 'net.Net'",
        "net.py:Net? featviz run weights.pth cat.jpg --arch net.py:Net --out 'my maps'",
    ),
    (
        "run net.py:Wrapped cat.jpg --model-arg widht=3",
        "unexpected keyword argument 'widht'",
        "did you mean width? Wrapped takes width, depth",
    ),
    (
        "run resnet18 cat.jpg --weights none --model-arg num_class=3",
        "unexpected keyword argument 'num_class'",
        "did you mean num_classes? ResNet takes",
    ),
    ("run nett.py:Net cat.jpg", "no file 'nett.py'", "featviz run net.py:Net cat.jpg"),
    ("run code cat.jpg", "no folder of a Hugging Face model", "FILE --arch MODEL"),
    (
        "run empty.pth cat.jpg",
        "empty.pth is no checkpoint: it is empty",
        "that torch.save wrote",
    ),
    (
        "run weights.pth cat.jpg",
        "matches no torchvision architecture",
        "--arch FILE.py:CLASS or --arch timm:NAME says what its weights are of",
    ),
    (
        "look Net cat.jpg",
        "no torchvision model or file named 'Net'",
        "did you mean net.py:Net? featviz look net.py:Net cat.jpg",
    ),
    ("report .", "is no run directory", "give a run: ran"),
    ("identify gone.pth", "File 'gone.pth' does not exist", "did you mean gan.pth?"),
    (
        "run gan.pth cat.jpg",
        "gan.pth holds no weights: keys 'critic', 'nets', 'state'",
        "--key says where they are",
    ),
    (
        "run resnet18 cat.jpg --weights no",
        "--weights 'no' is neither a file",
        "IMAGENET1K_V1",
    ),
]

IMAGES = [
    (
        "run model.pth cta.jpg",
        "no image 'cta.jpg'",
        "did you mean cat.jpg? featviz run model.pth",
    ),
    (
        "run model.pth far/x.jpg",
        "no image 'far/x.jpg'",
        "the current folder has no 'far'",
    ),
    (
        "run model.pth epmty.zip::a.png",
        "no archive 'epmty.zip'",
        "did you mean empty.zip?",
    ),
    (
        "run model.pth 'photos/*.jpg'",
        "no image matches 'photos/*.jpg'",
        "check the pattern",
    ),
    ("run model.pth empty.zip", "archive 'empty.zip' cannot be read", "is it whole?"),
]

LAYERS = [
    (
        f"{RUN} --layers b4",
        "no layer matches --layers 'b4'",
        "types here: Conv2d 2, ReLU 2; layers here: b",
    ),
    (
        f"{RUN} --layers conv2d",
        "no layer matches",
        "did you mean Conv2d? types here: Conv2d 2",
    ),
    (
        "run net.py:Wrapped cat.jpg --layers stem",
        "no layer matches --layers 'stem'",
        "did you mean '*stem' or backbone.stem?",
    ),
    (
        "run net.py:Wrapped cat.jpg --layers stem.call1",
        "no layer matches --layers 'stem.call1'",
        "did you mean '*stem' or backbone.stem?",
    ),
    (f"{RUN} --layers re:b[", "is no regular expression", "for example re:^layer[34]"),
    (f"{RUN} --ablate b4:1", "no layer matches 'b4'", "types here: Conv2d 2, ReLU 2"),
    (
        f"{RUN} --capture grad --target layer:b4",
        "called 'b4'",
        "featviz layers MODEL lists them",
    ),
]

VALUES = [
    (
        "audit model.pth cat.jpg --fail-on 'ded>5%' --eps 0.1",
        "there is no finding 'ded'",
        "dead? featviz audit model.pth cat.jpg --fail-on 'dead>5%' --eps 0.1",
    ),
    (f"{RUN} --cmap virdis", "--cmap 'virdis' is no colormap", "did you mean viridis"),
    (f"{RUN} --format pgn", "--format pgn: expected one of png", "did you mean png?"),
    (f"{RUN} --format PGN", "--format PGN: expected one of png", "did you mean png?"),
    (
        f"{RUN} --capture grad --target class:99",
        "--target 'class:99' needs scores of classes",
        "targets here: norm",
    ),
    ("sheet ran --reduce mean", "--reduce mean: expected pca", ""),
    (f"{RUN} --size ''", "--size '': expected pixels from 1 to 65536", ""),
    (
        f"{RUN} --reduce mean --order mean",
        "--order and --reduce mean exclude each other",
        "--reduce leaves one tile",
    ),
    (f"{RUN} --ablate b1:99", "--ablate 'b1:99': b1 has channels 0 to", ""),
    (
        f"{RUN} --config bad.toml",
        "has 'layer', which featviz run lacks; did you mean layers?",
        "a",
    ),
    (
        f"{RUN} --config worse.toml",
        "Unclosed array (at line 3, column",
        "lines of TOML say OPTION",
    ),
    (
        f"{RUN} --target sum",
        "--target does nothing without gradients",
        "add --capture output,grad",
    ),
    (
        "report ran --kernels photos",
        "photos holds no kernels",
        "a folder that `featviz kernels`",
    ),
    (
        "diff notes.txt photos",
        "notes.txt is a file, and no run directory",
        "two models are compared on images",
    ),
    (f"{RUN} --out cat.jpg", "--out cat.jpg is the input", ""),
    (
        f"{RUN} --resume --overwrite",
        "--resume and --overwrite exclude each other",
        "one of them",
    ),
]

MISTAKES = COMMANDS + OPTIONS + PLACES + MODELS + IMAGES + LAYERS + VALUES


def save_models(root: Path) -> None:
    """A model, its weights, and files of other weights."""
    modules = {
        "b1": nn.Conv2d(3, 4, 3),
        "b2": nn.ReLU(),
        "b3": nn.Conv2d(4, 4, 3),
        "relu": nn.ReLU(),
    }
    model = nn.Sequential(OrderedDict(modules))
    weights = model.state_dict()
    gan = {
        "critic": {"w": torch.ones(1)},
        "nets": {"generator": weights, "epoch": 3},
        "state": {0: 1},
    }
    torch.save(model, root / "model.pth")
    torch.save(weights, root / "weights.pth")
    torch.save(weights, root / "store" / "weights.pth")
    torch.save({"0.weight": torch.zeros(4, 3, 3, 3)}, root / "weights.jpg")
    torch.save(gan, root / "gan.pth")


TEXTS = {
    "net.py": NET,
    "code/net.py": NET,
    "notes.txt": "hello\n",
    "bad.toml": "[run]\nlayer = 'b1'\n",
    "worse.toml": "[run]\nlayers = ['b1'\nnrow = 3\n",
    "empty.pth": "",
    "empty.png": "",
    "empty.zip": "",
    "empty.py": "",
    "ex/exemplars.json": json.dumps(RUN_RECORD),
    "aud/audit.json": json.dumps(RUN_RECORD),
    "ran/run.json": json.dumps(RUN_RECORD),
}
"""Files of the folder, with their text."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the mistakes are made."""
    root = tmp_path_factory.mktemp("here")
    for name in ("photos", "code", "store", "ex", "aud", "ran"):
        (root / name).mkdir()
    for name, text in TEXTS.items():
        (root / name).write_text(text)
    save_models(root)
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), np.uint8)
    for name in ("cat.jpg", "my cat.jpg", "photos/a.png"):
        Image.fromarray(pixels).save(root / name)
    return root


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, which is the current one."""
    monkeypatch.chdir(folder)
    return folder


REFUSAL = re.compile(
    r"(warning: .*\n)*error: (?P<error>.+)\n(warning: .*\n)*(?P<hint>(hint: .+\n)?)"
)
"""All that may be printed: one error and at most one hint, no traceback."""


@pytest.mark.parametrize(
    ("line", "message", "hint"), MISTAKES, ids=[line for line, *_ in MISTAKES]
)
def test_a_mistake_gets_its_message_and_its_hint(
    line: str,
    message: str,
    hint: str,
    here: Path,
    featviz: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line says what is wrong, one helps; the code is 1 or 2, and nothing is
    written."""
    # what Python itself leaves beside a net.py
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = tree(here).keys()

    done = featviz(*shlex.split(line))

    assert done.code in (1, 2)
    assert done.out == ""
    assert tree(here).keys() == before
    refusal = REFUSAL.fullmatch(done.err)
    assert refusal, done.err
    assert message in refusal["error"]
    assert hint in refusal["hint"]


def test_an_earlier_run_is_named_behind_a_misspelt_layer_with_the_whole_command(
    here: Path, featviz: Run, tmp_path: Path
) -> None:
    """Who mends one error gets no second one for what was typed before; --overwrite is
    typed for them, with all options and quotes."""
    out = tmp_path / "my maps"
    line = ["run", "model.pth", "cat.jpg", "--out", str(out), "-q", "--layers"]
    assert featviz(*line, "b1").code == 0
    misspelt = featviz(*line, "b4")
    assert misspelt.code == 2
    assert "no layer matches --layers 'b4'" in misspelt.err
    earlier = featviz(*line, "b[12]")
    assert earlier.code == 1
    assert "holds a run, 1 image complete" in earlier.err
    command = shlex.join(["featviz", *line, "b[12]", "--overwrite"])
    assert earlier.err.splitlines()[-1].endswith(f"--overwrite replaces it: {command}")
    assert featviz(*shlex.split(command)[1:]).code == 0


@pytest.mark.slow
def test_mistakes_do_not_wait_for_torch(here: Path) -> None:
    """It is imported for the content of a model or of an image alone."""
    quick = [*COMMANDS, *OPTIONS, *PLACES][::9]
    lines = [line for line, *_ in quick]
    lines += ["run resnet81 cat.jpg", "look resnet18 nosuch.jpg"]
    for line, done in zip(lines, apart(lines, here), strict=True):
        assert done.code == 2, line
        assert "torch" not in done.imported, line


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "line",
    [
        "run model.pth photos --layers b1, -q",
        "run model.pth --layers b1, photos/a.png",
        "run weights.jpg photos --arch net.py:Net --partial --layers Conv2d",
        "run model.pth --layers 'b1, b3' photos/a.png",
        "run model.pth photos/a.png --layers Conv2d[0] --format jpeg",
    ],
)
def test_what_only_looks_like_a_mistake_runs(
    line: str, featviz: Run, tmp_path: Path
) -> None:
    """A comma at the end of a list, a space inside quotes and an index as in Python are
    taken."""
    done = featviz(*shlex.split(line), "--out", tmp_path / "out")
    assert done.code == 0, done.err


@pytest.mark.usefixtures("here")
def test_the_last_line_of_a_run_names_what_failed_and_how_to_look(
    featviz: Run, tmp_path: Path
) -> None:
    """An empty image is called empty; the others are done, and a command shows them. A
    selector that takes nothing is warned of, with what may be meant."""
    out = tmp_path / "my maps"
    options = ("--layers", "b1,b4", "--out", out)
    done = featviz("run", "model.pth", "photos", "empty.png", *options)
    assert done.code == 3
    assert "error: empty.png is empty" in done.err
    assert "'b4' matches no layer" in done.err
    failure = f"1 picture of 1 image in {out}; 1 image failed: empty.png (see run.json)"
    hint = f"to look at them: featviz report '{out}' --open"
    assert done.err.splitlines()[-1] == f"{failure}; {hint}"


@pytest.mark.usefixtures("here")
def test_two_models_warn_once_of_the_same(featviz: Run) -> None:
    """Of a misspelt layer, and of a guess: both models have it."""
    done = featviz("diff", "model.pth", "model.pth", "photos", "--layers", "b1,b4")
    assert done.err.count("'b4' matches no layer") == 1
    assert done.err.count("preprocessing is a guess") == 1


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that went to Python's webbrowser, which starts none."""
    addresses: list[str] = []
    monkeypatch.setattr("webbrowser.open", addresses.append)
    return addresses


B1 = ("run", "model.pth", "cat.jpg", "--layers", "b1")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("reports", [False, True], ids=["run", "report"])
def test_open_shows_the_report_in_the_browser(
    reports: bool, featviz: Run, opened: list[str], tmp_path: Path
) -> None:
    """The page's address goes to Python's webbrowser, once; where it starts none, the
    last line has the address."""
    out = tmp_path / "out"
    run = (*B1, "--out", out)
    if reports:
        assert featviz(*run, "-q").code == 0
    done = featviz(*(("report", out) if reports else run), "--open")
    assert done.code == 0
    address = (out / "report" / "index.html").as_uri()
    assert opened == [address]
    assert done.err.endswith(f"no browser could be started: open {address}\n")


@pytest.mark.usefixtures("here")
def test_a_browser_is_opened_only_for_open(
    featviz: Run, opened: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--report writes the page alone; where a browser starts, the last line says so."""
    out = tmp_path / "out"
    assert featviz(*B1, "--out", out, "--report").code == 0
    assert not opened
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    last = featviz("report", out, "--open").err.splitlines()[-1]
    assert last.endswith("opened in the browser")
    assert str(out / "report" / "index.html") in last


@pytest.mark.usefixtures("here")
def test_a_long_command_is_not_said_again(featviz: Run) -> None:
    """A shell has made hundreds of names of a glob: the hint is without them."""
    names = [f"photos/{number:04}.png" for number in range(40)]
    done = featviz("run", "model.pth", *names, "--layer", "b1")
    assert done.err.splitlines()[-1] == "hint: did you mean --layers?"
