"""What goes wrong first with a network of one's own, word by word: its arguments, the
file of its weights, the size of its input, and the name of a command."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import Run
from PIL import Image
from torch import nn
from torchvision.models import VisionTransformer, vision_transformer

NET = """
import torch
from torch import nn

class Classifier(nn.Sequential):
    def __init__(self, classes, *, width=4):
        super().__init__(nn.Conv2d(3, width, 1), nn.Flatten(), nn.Linear(width, classes))

class Sized(nn.Module):
    def __init__(self, classes=10, width=8, depth=3):
        super().__init__()
        self.stem, self.relu = nn.Conv2d(depth, width, 3), nn.ReLU()
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.relu(self.stem(x)).mean((2, 3)))

class Broken(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3))

class Halving(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.Upsample(scale_factor=2)

    def forward(self, x):
        x = self.conv(x)
        return torch.cat([x, self.up(self.pool(x))], 1)

class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.relu = nn.ReLU()
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = self.relu(self.down(self.relu(self.conv(x))))
        return self.head(x.mean((2, 3)))
"""

MODELS = [
    (
        "look net.py:Classifier p.png",
        "net.py:Classifier raised TypeError: Classifier.__init__() missing 1 required"
        " positional argument: 'classes'",
        "add --model-arg classes=VALUE",
    ),
    # not an argument of the model itself
    (
        "look net.py:Broken p.png",
        "net.py:Broken raised TypeError: Linear.__init__() missing 1 required"
        " positional argument: 'out_features'",
        "-v shows the traceback",
    ),
    (
        "cam net.py:Classifier p.png --weights seven.pth --model-arg classes=5",
        "seven.pth does not fit net.py:Classifier: 2 of 4 tensors; 2.weight is [7, 4],"
        " not [5, 4], 2.bias is [7], not [5]",
        "another --arch, --model-arg classes=7, or --partial for what fits",
    ),
    (
        "cam net.py:Classifier p.png --weights seven.pth --model-arg classes=7"
        " --model-arg width=3",
        "seven.pth does not fit net.py:Classifier: 1 of 4 tensors; 0.weight is"
        " [4, 3, 1, 1], not [3, 3, 1, 1], 0.bias is [4], not [3], 2.weight is [7, 4],"
        " not [7, 3]",
        "another --arch, --model-arg, or --partial for what fits",
    ),
    # the number of input channels is what it was
    (
        "cam sized.pth p.png --arch net.py:Sized",
        "sized.pth does not fit net.py:Sized: 0 of 4 tensors; stem.weight is"
        " [16, 3, 3, 3], not [8, 3, 3, 3], stem.bias is [16], not [8], head.weight is"
        " [5, 16], not [10, 8], head.bias is [5], not [10]",
        "another --arch, or --model-arg width=16 --model-arg classes=5",
    ),
    # Twice and Halving have other modules
    (
        "look sized.pth p.png",
        "sized.pth matches no torchvision architecture",
        "net.py:Sized has such modules: featviz look sized.pth p.png --arch"
        " net.py:Sized",
    ),
    # the class that has the modules lies beside the file
    (
        "look net.py:Halving p.png --weights sized.pth",
        "sized.pth does not fit net.py:Halving: 0 of 2 tensors; missing conv.weight,"
        " conv.bias; unexpected stem.weight, stem.bias, head.weight, head.bias",
        "another --arch: net.py:Sized has such modules",
    ),
    # --partial would load nothing
    (
        "cam net.py:Halving p.png --weights seven.pth --partial",
        "seven.pth does not fit net.py:Halving: 0 of 2 tensors; missing conv.weight,"
        " conv.bias; unexpected 0.weight, 0.bias, 2.weight, 2.bias",
        "another --arch, or --model-arg",
    ),
    (
        "cam layer.pth p.png --arch net.py:Halving",
        "layer.pth does not fit net.py:Halving: 0 of 2 tensors; missing conv.weight,"
        " conv.bias; unexpected weight, bias",
        "the file is a whole model, which runs by itself: give it as MODEL, without"
        " --arch",
    ),
]

TRUST = [
    (
        "look script.pth p.png",
        "script.pth needs __main__.Twice, which could run any code; nothing was"
        " executed",
        "the script that saved the file defined it, where --trust cannot find it; for the"
        " weights in the file, --arch net.py:Twice: featviz look script.pth p.png --arch"
        " net.py:Twice",
    ),
    (
        "look whole.pth p.png",
        "whole.pth needs net.Halving, which could run any code; nothing was executed",
        "if you trust the file, --trust: featviz look whole.pth p.png --trust; for the"
        " weights in it, --arch net.py:Halving: featviz look whole.pth p.png --arch"
        " net.py:Halving",
    ),
]

WEIGHTS = [
    (
        "look net.py:Halving p.png --weights sevn.pth",
        "no weights file 'sevn.pth'",
        "did you mean seven.pth? featviz look net.py:Halving p.png --weights seven.pth",
    ),
    (
        "audit resnet18 p.png --weights=sevn.pth",
        "no weights file 'sevn.pth'",
        "did you mean seven.pth? featviz audit resnet18 p.png --weights=seven.pth",
    ),
    (
        "look net.py:Halving p.png --weights default",
        "no weights file 'default'",
        "your class or function takes a file, or none (as the code makes them)",
    ),
]

SIZES = [
    (
        "look net.py:Halving p.png --weights none --preset none",
        "the model failed in Halving: Sizes of tensors must match except in dimension"
        " 1. Expected size 51 but got size 50 for tensor number 1 in the list.",
        "the input was [1, 3, 51, 70]; --size 51x51 makes it square, --size 64x64 lets it"
        " be halved five times, --crop and --input-channels change it, -v shows the"
        " traceback",
    ),
    (
        "cam net.py:Classifier p.png --model-arg classes=5 --size 64x64",
        "the model failed in 2 (Linear): mat1 and mat2 shapes cannot be multiplied"
        " (1x16384 and 4x5)",
        "the input was [1, 3, 64, 64]; --size, --crop and --input-channels change it, -v"
        " shows the traceback",
    ),
]

COMMANDS = [
    (
        "show resnet18 p.png",
        "No such command 'show'.",
        "did you mean look? featviz look resnet18 p.png",
    ),
    (
        "summary resnet18",
        "No such command 'summary'.",
        "did you mean layers? featviz layers resnet18",
    ),
    (
        "vizualize resnet18 p.png",
        "No such command 'vizualize'.",
        "featviz --help describes them: look, run, report, layers, kernels, sheet, cam,"
        " field, exemplars, audit, diff, merge, verify, identify",
    ),
    (
        "layers torchvision:resnet81",
        "no torchvision model or file named 'resnet81'",
        "did you mean torchvision:resnet18, torchvision:resnet152, torchvision:resnet101?"
        " featviz layers torchvision:resnet18",
    ),
    (
        "help run",
        "No such command 'help'.",
        "did you mean --help? featviz run --help",
    ),
    (
        "look resnet18 p.png --weight none",
        "No such option '--weight'.",
        "did you mean --weights? featviz look resnet18 p.png --weights none",
    ),
    (
        "kernels resnet18 --preset none",
        "No such option '--preset'.",
        "kernels takes no images, and no options for them",
    ),
    (
        "cam resnet18 p.png --target 'tabby cat'",
        "--target 'tabby cat' cannot be read",
        "a class of this name is written 'class:tabby cat'; other targets: class:NAME,"
        " class:N, box, mean, output[KEY]:mean or layer:NAME:CHANNEL",
    ),
    (
        "run resnet18 p.png --layers",
        "Option '--layers' requires an argument.",
        "--layers SELECTORS: Take layers by class or name, such as Conv2d,ReLU or"
        " 'layer1.*'.",
    ),
    (
        "look resnet18 p.png --open=yes",
        "Option '--open' does not take a value.",
        "--open: Open the picture.",
    ),
    (
        "report resnet18 p.png",
        "Directory 'resnet18' does not exist.",
        "a report is made of a run: featviz run resnet18 p.png --report",
    ),
    (
        "report seven.pth p.png --open",
        "Got unexpected extra argument (p.png)",
        "a report is made of a run: featviz run seven.pth p.png --open --report",
    ),
    (
        "report exemplars",
        "exemplars is no run directory: it has no run.json",
        "exemplars stand beside a run: featviz report RUN --exemplars exemplars",
    ),
]

MISTAKES = MODELS + TRUST + WEIGHTS + SIZES + COMMANDS


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a network, weights for seven classes, and an image."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    seven = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(4, 7))
    torch.save(seven.state_dict(), "seven.pth")
    torch.save(seven[0], "layer.pth")
    sized = {"stem": nn.Conv2d(3, 16, 3), "head": nn.Linear(16, 5)}
    torch.save(nn.ModuleDict(sized).state_dict(), "sized.pth")
    halving = type("Halving", (nn.Module,), {"__module__": "net"})
    monkeypatch.setitem(sys.modules, "net", SimpleNamespace(Halving=halving))
    torch.save(halving(), "whole.pth")
    monkeypatch.delitem(sys.modules, "net")
    twice = type("Twice", (nn.Module,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Twice", twice, raising=False)
    torch.save(twice(), "script.pth")
    Image.new("RGB", (70, 51), "teal").save("p.png")
    Path("exemplars").mkdir()
    Path("exemplars/exemplars.json").write_text("{}")
    return tmp_path


@pytest.mark.medium
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("line", "message", "hint"), MISTAKES, ids=[line for line, *_ in MISTAKES]
)
def test_a_first_mistake_gets_this_message_and_this_hint(
    line: str, message: str, hint: str, featviz: Run
) -> None:
    """Word by word, and no warning before it."""
    done = featviz(*shlex.split(line))
    printed = done.err.replace("addmm: ", "")  # as some releases of torch begin it
    assert printed.splitlines() == [f"error: {message}", f"hint: {hint}"]


@pytest.mark.medium
@pytest.mark.usefixtures("here")
def test_warnings_of_the_model_come_with_the_first_result(featviz: Run) -> None:
    """A line each: whose weights they are, and that the preprocessing is a guess."""
    done = featviz("look", "net.py:Halving", "p.png", "--out", "page.png")
    assert done.err.splitlines()[:-1] == [
        "warning: weights as net.py:Halving makes them; --weights FILE loads yours",
        "warning: preprocessing is a guess, --preset imagenet; --preset none, --size,"
        " --mean and --std change it",
    ]


@pytest.mark.medium
@pytest.mark.usefixtures("here")
def test_a_layer_that_ends_two_stages_counts_once(featviz: Run) -> None:
    """The page has a row for each of its stages, and the last line counts layers."""
    done = featviz("look", "net.py:Twice", "p.png", "--out", "page.png", "--json")
    rows = [row["layer"] for row in json.loads(done.out)["layers"]]
    assert rows == ["conv", "relu", "relu"]
    assert done.err.splitlines()[-1] == "2 layers in page.png"


@pytest.mark.medium
@pytest.mark.usefixtures("here")
def test_the_last_line_says_how_to_look_at_kernels_and_exemplars(featviz: Run) -> None:
    """With the command that shows them."""
    model = ("net.py:Halving", "--weights", "none", "--layers", "conv")
    kernels = featviz("kernels", *model).err.splitlines()
    exemplars = featviz("exemplars", *model, "p.png").err.splitlines()
    assert kernels[-1] == (
        "kernels of 1 layer in featviz-kernels, the first ones in kernels.png; to look at"
        " them: featviz report featviz-kernels --open"
    )
    assert exemplars[-1] == (
        "results in featviz-exemplars; to look at them beside RUN, a folder of featviz"
        " run: featviz report RUN --exemplars featviz-exemplars"
    )


def small_transformer(*args: object, **options: object) -> VisionTransformer:
    """Of two layers: a ViT-B takes five seconds to be filled with random numbers."""
    return VisionTransformer(224, 32, 2, 2, 16, 32)


@pytest.mark.medium
@pytest.mark.usefixtures("here")
def test_random_weights_may_explain_nothing(
    featviz: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchvision's transformers begin with a head of zeros, and no layer helps."""
    monkeypatch.setattr(vision_transformer, "_vision_transformer", small_transformer)
    done = featviz("cam", "vit_b_16", "p.png", "--weights", "none")
    assert done.code == 1
    hint = "hint: load trained weights: random ones may let no gradient through"
    assert done.err.splitlines()[-1] == hint


@pytest.mark.parametrize("images", ["nowhere.png", "p.png nowhere.png", "*.jpg"])
def test_an_image_that_is_not_there_is_said_before_the_model_is_loaded(
    images: str, featviz: Run
) -> None:
    """A network of some gigabytes is not waited for."""
    code = "from pathlib import Path\nfrom torch import nn\nPath('loaded').touch()\n"
    Path("slow.py").write_text(code + "Net = nn.ReLU\n")
    Image.new("RGB", (8, 8)).save("p.png")
    done = featviz("run", "slow.py:Net", *images.split(), "-o", "out")
    assert done.code == 2
    assert images.split()[-1] in done.err
    assert not Path("loaded").exists()
    assert featviz("run", "slow.py:Net", "p.png", "-q", "-o", "out").code == 0
    assert Path("loaded").exists()
