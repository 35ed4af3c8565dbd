"""--forward-arg: further arguments of forward, beside the image."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from PIL import Image
from runs import refused
from torch import nn

import featviz as package
from featviz.models import arguments
from featviz.models.load import load_model
from featviz.options import InputOptions, ModelOptions

pytestmark = pytest.mark.usefixtures("imports_undone")

CODE = """
import torch
from torch import nn

class Conditional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)
        self.words = nn.Embedding(9, 2)
    def forward(self, x, t, ids=None, mask=None):
        y = self.conv(x) * t
        y = y if ids is None else y + self.words(ids).mean(1)[:, :, None, None]
        return y if mask is None else y.mul_(mask.mul_(2))

class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)
    def forward(self, t, x):
        return self.conv(x) * t

class OfDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)
    def forward(self, batch):
        return self.conv(batch["image"]) * batch["weight"]

def image_alone(picture):
    return {"x": torch.zeros(1, 3, 4, 5)}
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "user_net.py"
    path.write_text(CODE)
    return path


def kept(run: Path, name: str, layer: str) -> np.ndarray:
    (folder,) = (run / name).glob(f"*_{layer}")
    array: np.ndarray = np.load(folder / "output.npy")
    return array


def drawn(
    featviz: Run, code: Path, picture: Path, net: str, *given: str
) -> tuple[Path, nn.Module]:
    """The run directory with the raw output of `conv`'s parent, and the model of the
    same seed."""
    out = code.parent / "out"
    words = [part for text in given for part in ("--forward-arg", text)]
    common = (
        "--preset",
        "none",
        "--tensors",
        "npy",
        "--layers",
        f"conv,{net}",
        "--out",
        out,
    )
    done = featviz("run", f"{code}:{net}", picture, *common, *words)
    assert done.code == 0, done.err
    model = load_model(ModelOptions(f"{code}:{net}"), InputOptions(preset="none"))
    return out, model.module


def picture_values(picture: Path) -> torch.Tensor:
    pixels = np.asarray(Image.open(picture).convert("RGB"))
    return torch.from_numpy(pixels.astype("f4") / 255).permute(2, 0, 1)[None]


def test_numbers_files_and_zeros_reach_forward(
    featviz: Run, code: Path, picture: Path
) -> None:
    """The output is that of the module called with the same arguments by hand; run.json
    has a file's name and sha256, without its folder."""
    x = picture_values(picture)
    mask = np.random.default_rng(0).random((1, 1, *x.shape[2:])).astype("f4")
    np.save(code.parent / "mask.npy", mask)
    torch.save(torch.tensor([[3, 4]]), code.parent / "ids.pt")
    given = (
        "t=2.5",
        f"ids={code.parent / 'ids.pt'}",
        f"mask={code.parent / 'mask.npy'}",
    )
    out, module = drawn(featviz, code, picture, "Conditional", *given)
    with torch.no_grad():
        y = (
            module.conv(x) * 2.5
            + module.words.weight[[3, 4]].mean(0)[None, :, None, None]
        )
    expected = (y * torch.from_numpy(mask) * 2).numpy()
    np.testing.assert_allclose(
        kept(out, picture.name, "Conditional"), expected, atol=1e-5
    )
    record = json.loads((out / "run.json").read_text())
    assert "with t=2.5 and ids=ids.pt (sha256 " in record["preprocessing"]
    assert str(code.parent) not in json.dumps(record["options"])


@pytest.mark.parametrize(
    ("net", "given"),
    [("Second", ("t=3",)), ("OfDict", ("batch.image=image", "batch.weight=3"))],
)
def test_where_the_image_goes(
    net: str, given: tuple[str, ...], featviz: Run, code: Path, picture: Path
) -> None:
    """To the first parameter that is not given, or where NAME.KEY=image says."""
    out, module = drawn(featviz, code, picture, net, *given)
    with torch.no_grad():
        expected = module.conv(picture_values(picture)).numpy() * 3
    np.testing.assert_allclose(kept(out, picture.name, net), expected, atol=1e-5)


def test_a_tensor_is_the_same_for_every_image(
    featviz: Run, code: Path, tmp_path: Path, picture: Path
) -> None:
    """A model that changes its argument in place does not change it for the next image."""
    again = tmp_path / "again.png"
    again.write_bytes(picture.read_bytes())
    model = f"{code}:Conditional"
    options = "--layers Conditional --preset none --tensors npy"
    arguments = "--forward-arg t=1 --forward-arg mask=ones:1,1,1,1"
    out = ("--out", tmp_path / "out")
    done = featviz(
        "run", model, picture, again, *options.split(), *arguments.split(), *out
    )
    assert done.code == 0, done.err
    first, second = (
        kept(tmp_path / "out", p.name, "Conditional") for p in (picture, again)
    )
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["foo=1"], "forward_args foo: forward of Conditional takes x, t, ids, mask"),
        (["t=1", "t.k=2"], "forward_args t.k is given twice"),
        (
            ["t=zeros:99999,9999999"],
            "forward_args t=zeros:99999,9999999 has 999,989,900,001 values",
        ),
        (["t=open('x')"], "forward_args t=open('x') is no value"),
        (["t=none.npy"], "forward_args t: none.npy is no file"),
        (["t=bad.npy"], "forward_args t: bad.npy cannot be read: it is no array"),
        (
            ["t=bad.pt"],
            "forward_args t: bad.pt is no whole file of torch.save: it is no pickle",
        ),
    ],
)
def test_what_is_no_argument_gets_one_line(
    featviz: Run,
    code: Path,
    picture: Path,
    given: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A usage error with the value and the remedy; nothing is written."""
    monkeypatch.chdir(code.parent)
    for name in ("bad.npy", "bad.pt"):
        (code.parent / name).write_bytes(b"no array")
    words = [part for text in given for part in ("--forward-arg", text)]
    refused(featviz("run", f"{code}:Conditional", picture, *words, "-q"), 2, message)
    assert not (code.parent / "featviz-out").exists()


class Remembers(nn.Module):
    """Notes what it is given as `cache` and how full that is, and fills it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)
        self.seen: list[tuple[type, int]] = []

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        self.seen.append((type(cache), -1 if cache is None else len(cache)))
        if isinstance(cache, dict):
            cache["x"] = x
        elif isinstance(cache, list):
            cache.append(x)
        maps: torch.Tensor = self.conv(x)
        return maps


@pytest.mark.parametrize("given", [{}, [7], {"k": 7}])
def test_lists_and_dicts_reach_forward_as_they_are(given: Any, picture: Path) -> None:
    """Empty ones, too, and anew for each call: what a model puts in is gone for the
    next image."""
    model, again = Remembers(), picture.with_name("again.png")
    again.write_bytes(picture.read_bytes())
    before = copy.copy(given)
    out, options = (
        picture.parent / "out",
        {"forward_args": {"cache": given}, "preset": "none"},
    )
    package.run(model, [picture, again], "conv", out, **options)
    assert len(model.seen) >= 2 and set(model.seen) == {(type(given), len(before))}
    assert given == before
    words = f"cache.k={given['k']}" if given == {"k": 7} else f"cache={given!r}"
    record = json.loads((out / "run.json").read_text())
    assert f"with {words}" in record["preprocessing"]


@pytest.mark.parametrize(
    ("text", "expected"), [("t=-2.5e3", -2500.0), ("t=False", False), ("t=none", None)]
)
def test_words_and_numbers(text: str, expected: object) -> None:
    """As Python has them, whatever their case."""
    (argument,) = arguments.parse([text])
    assert argument.value == expected and type(argument.value) is type(expected)


TRANSFORMS = """
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
def transforms(tmp_path: Path) -> Path:
    (tmp_path / "user_net.py").write_text(TRANSFORMS)
    return tmp_path / "user_net.py"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """6 × 4 pixels."""
    pixels = np.random.default_rng(0).integers(1, 256, (4, 6, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    return tmp_path / "image.png"


@pytest.mark.parametrize("function", ["five", "named"])
def test_the_model_gets_what_the_function_gives(
    function: str, featviz: Run, transforms: Path, image: Path, tmp_path: Path
) -> None:
    """A tensor of any number of channels, with or without the batch axis, and a dict of
    arguments, which reach forward by their names; gradients pass beside indices, which
    can have none. input.png shows the first three of five channels, their least value
    black."""
    out = tmp_path / "out"
    arguments = (
        "--transform",
        f"{transforms}:{function}",
        "--out",
        out,
        "--tensors",
        "npy",
    )
    gradients = ("--capture", "output,grad", "--target", "sum")
    outcome = featviz(
        "run",
        f"{transforms}:Net",
        image,
        "--layers",
        "conv,Net",
        *arguments,
        *gradients,
    )
    assert outcome.code == 0, outcome.err
    assert "guess" not in outcome.err
    values = np.asarray(Image.open(image)).astype(np.float32).transpose(2, 0, 1) - 100
    expected = values.sum(0) + values[:2].sum(0)
    maps = np.load(out / "image.png" / "001_conv" / "output.npy")
    np.testing.assert_allclose(maps, np.stack([expected, expected])[None], rtol=1e-5)
    manifest = json.loads((out / "image.png" / "manifest.json").read_text())
    digest = hashlib.sha256(TRANSFORMS.encode()).hexdigest()[:16]
    words = f"RGB, transform {transforms.name}:{function} (sha256 {digest})"
    assert manifest["input"]["preprocessing"] == words
    assert str(tmp_path) not in (out / "run.json").read_text()
    rows = [row for row in manifest["captures"] if row["kind"] == "output"]
    channels = [row["maps"] for row in rows if row["layer"] == ""]
    assert channels == [3 if function == "named" else 2]
    first = np.asarray(Image.open(image)).astype(float)
    black = (first - first.min()) / (first.max() - first.min()) * 255
    shown = np.asarray(Image.open(out / "image.png" / "input.png"))
    assert shown.shape == (4, 6, 3) and np.abs(shown - black).max() <= 1


@pytest.mark.parametrize(
    ("function", "code_", "message"),
    [
        ("user_net.py", 2, "names no function"),
        ("user_net.py:number", 2, "is a int"),
        ("user_net.py:broken", 1, "gave a tuple, expected a tensor"),
        (
            "user_net.py:fails",
            1,
            "raised ZeroDivisionError: division by zero, for an empty image",
        ),
    ],
)
def test_what_is_no_transform_gets_one_line(
    function: str,
    code_: int,
    message: str,
    featviz: Run,
    transforms: Path,
    image: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The function is tried on an empty image before the run begins."""
    monkeypatch.chdir(transforms.parent)
    refused(
        featviz("run", f"{transforms}:Net", image, "--transform", function),
        code_,
        message,
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("picky", "raised ValueError: not this one"),
        ("moody", "gave another kind of output than for an empty image"),
    ],
)
def test_an_image_that_it_fails_on_is_that_images_failure(
    function: str,
    message: str,
    featviz: Run,
    transforms: Path,
    image: Path,
    tmp_path: Path,
) -> None:
    """The other images go on."""
    Image.new("RGB", (6, 4)).save(tmp_path / "empty.png")
    out = tmp_path / "out"
    images = (image, tmp_path / "empty.png")
    options = ("--transform", f"{transforms}:{function}", "--out", out)
    outcome = featviz("run", f"{transforms}:Net", *images, *options)
    assert outcome.code == 3 and message in outcome.err
    assert (out / "empty.png" / "manifest.json").is_file()
