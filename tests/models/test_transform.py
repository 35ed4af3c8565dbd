"""--transform: a function of the user's makes the model's input from an image."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.outcomes import Run, refused
from PIL import Image
from torch import nn

import featviz as package
from featviz.errors import UsageError

pytestmark = pytest.mark.usefixtures("imports_undone")

CODE = """
import torch
from torch import nn
from torchvision.transforms.functional import pil_to_tensor

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(5, 2, 1)
        nn.init.ones_(self.conv.weight)
        nn.init.zeros_(self.conv.bias)
    def forward(self, flag=None, *, image=None, index=None):
        image = flag if image is None else image
        maps = self.conv(image)
        return maps if index is None else maps[:, index]

def five(image):
    x = pil_to_tensor(image).float() - 100
    return torch.cat([x, x[:2]])

def batch(image):
    return five(image)[None]

def named(image):
    return {"index": torch.tensor([1, 0, 1]), "image": batch(image)}

def moody(image):
    return named(image) if image.getbbox() is None else {"image": batch(image)}

def picky(image):
    if image.getbbox() is not None:
        raise ValueError("not this one")
    return five(image)

def broken(image):
    return image.size

def fails(image):
    return 1 / 0

number = 4
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "user_net.py").write_text(CODE)
    return tmp_path / "user_net.py"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """6 × 4 pixels."""
    pixels = np.random.default_rng(0).integers(1, 256, (4, 6, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    return tmp_path / "image.png"


@pytest.mark.parametrize("function", ["five", "batch", "named"])
def test_the_model_gets_what_the_function_gives(
    function: str, featviz: Run, code: Path, image: Path, tmp_path: Path
) -> None:
    """A tensor of any number of channels, with or without the batch axis, and a dict of arguments,
    which reach forward by their names."""
    out = tmp_path / "out"
    arguments = ("--transform", f"{code}:{function}", "--out", out, "--tensors", "npy")
    outcome = featviz("run", f"{code}:Net", image, "--layers", "conv,Net", *arguments)
    assert outcome.code == 0, outcome.err
    assert "guess" not in outcome.err
    values = np.asarray(Image.open(image)).astype(np.float32).transpose(2, 0, 1) - 100
    expected = values.sum(0) + values[:2].sum(0)
    maps = np.load(out / "image.png" / "001_conv" / "output.npy")
    np.testing.assert_allclose(maps, np.stack([expected, expected])[None], rtol=1e-5)
    manifest = json.loads((out / "image.png" / "manifest.json").read_text())
    digest = hashlib.sha256(CODE.encode()).hexdigest()[:16]
    words = f"RGB, transform {code.name}:{function} (sha256 {digest})"
    assert manifest["input"]["preprocessing"] == words
    assert str(tmp_path) not in (out / "run.json").read_text()
    channels = [row["maps"] for row in manifest["captures"] if row["layer"] == ""]
    assert channels == [3 if function == "named" else 2]


def test_gradients_pass_beside_indices(
    featviz: Run, code: Path, image: Path, tmp_path: Path
) -> None:
    """Arguments that can have no gradient take no part in the way back."""
    arguments = ("--transform", f"{code}:named", "--out", tmp_path / "out")
    outcome = featviz(
        "run", f"{code}:Net", image, "--capture", "grad", "--target", "sum", *arguments
    )
    assert outcome.code == 0, outcome.err


def test_layers_and_summary_take_it_too(featviz: Run, code: Path) -> None:
    """Without an image the function gets an empty one of 224 × 224 pixels."""
    outcome = featviz("summary", f"{code}:Net", "--transform", f"{code}:five", "--json")
    assert json.loads(outcome.out)["input_shape"] == [1, 5, 224, 224]


def test_the_input_picture_is_the_first_three_channels_over_their_range(
    featviz: Run, code: Path, image: Path, tmp_path: Path
) -> None:
    """Five channels are no picture: input.png shows three of them, their least value black."""
    featviz("run", f"{code}:Net", image, "--transform", f"{code}:five", "--out", tmp_path / "out")
    first = np.asarray(Image.open(image)).astype(float)
    expected = (first - first.min()) / (first.max() - first.min()) * 255
    shown = np.asarray(Image.open(tmp_path / "out" / "image.png" / "input.png"))
    assert shown.shape == (4, 6, 3) and np.abs(shown - expected).max() <= 1


@pytest.mark.parametrize(
    ("function", "code_", "message"),
    [
        ("user_net.py", 2, "names no function"),
        ("user_net.py:nothing", 2, "there is no 'nothing'"),
        ("user_net.py:number", 2, "is a int"),
        ("user_net.py:broken", 1, "gave a tuple, expected a tensor"),
        ("user_net.py:fails", 1, "raised ZeroDivisionError: division by zero, for an empty image"),
    ],
)
def test_what_is_no_transform_gets_one_line(
    function: str,
    code_: int,
    message: str,
    featviz: Run,
    code: Path,
    image: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The function is tried on an empty image before the run begins."""
    monkeypatch.chdir(code.parent)
    refused(featviz("run", f"{code}:Net", image, "--transform", function), code_, message)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("picky", "raised ValueError: not this one"),
        ("moody", "gave a dict of image, and before a dict of image, index"),
    ],
)
def test_an_image_that_it_fails_on_is_that_images_failure(
    function: str, message: str, featviz: Run, code: Path, image: Path, tmp_path: Path
) -> None:
    """The other images go on."""
    Image.new("RGB", (6, 4)).save(tmp_path / "empty.png")
    out = tmp_path / "out"
    images = (image, tmp_path / "empty.png")
    options = ("--transform", f"{code}:{function}", "--out", out)
    outcome = featviz("run", f"{code}:Net", *images, *options)
    assert outcome.code == 3 and message in outcome.err
    assert (out / "empty.png" / "manifest.json").is_file()


def test_a_module_of_the_callers_takes_no_transform(image: Path, tmp_path: Path) -> None:
    """A transform may change how a module is called, and a module is given back as it was."""
    with pytest.raises(UsageError, match="transform as text is for a MODEL string"):
        package.run(nn.Conv2d(3, 1, 1), image, out=tmp_path / "out", transform="a.py:f")
    assert torch.is_grad_enabled()
