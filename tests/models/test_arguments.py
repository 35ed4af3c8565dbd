"""--forward-arg: further arguments of forward, beside the image."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import Run
from PIL import Image
from runs import complete, refused, run_json
from torch import Tensor, nn

import featviz as package
from featviz.errors import ImageError
from featviz.models import arguments
from models.drawn import DrawnImage
from models.loading import load

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

class First(Second):
    def forward(self, x, /, t):
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


@pytest.fixture
def pixels(picture: Path) -> Tensor:
    """The picture as the models get it, values of 0 to 1."""
    values = np.asarray(Image.open(picture).convert("RGB")).astype("f4") / 255
    return torch.from_numpy(values).permute(2, 0, 1)[None]


def flags(arguments: Sequence[str]) -> list[str]:
    """Each as an option of the command line."""
    return [f"--forward-arg={argument}" for argument in arguments]


@pytest.fixture
def draw_net(featviz: Run, code: Path, picture: Path) -> Callable[..., DrawnImage]:
    """Draw the picture by a model of the code: its output, raw."""

    def draw(net: str, *arguments: str) -> DrawnImage:
        out = code.parent / "out"
        options = [
            "--preset",
            "none",
            "--tensors",
            "npy",
            "--layers",
            net,
            "--out",
            out,
        ]
        done = featviz("run", f"{code}:{net}", picture, *options, *flags(arguments))
        assert done.code == 0, done.err
        return DrawnImage(out / picture.name)

    return draw


@pytest.mark.medium
def test_numbers_files_and_zeros_reach_forward(
    draw_net: Callable[..., DrawnImage], code: Path, pixels: Tensor
) -> None:
    """The output is that of the module called with the same arguments by hand; run.json
    has a file's name and sha256, without its folder."""
    ids = code.parent / "ids.pt"
    mask = code.parent / "mask.npy"
    torch.save(torch.tensor([[3, 4]]), ids)
    np.save(mask, np.random.default_rng(0).random((1, 1, 20, 24)).astype("f4"))
    drawn = draw_net("Conditional", "t=2.5", f"ids={ids}", f"mask={mask}")

    model = load(f"{code}:Conditional")
    with torch.no_grad():
        expected = model(pixels, 2.5, torch.load(ids), torch.from_numpy(np.load(mask)))
    torch.testing.assert_close(drawn.tensor(""), expected, atol=1e-5, rtol=1e-7)
    record = run_json(code.parent / "out")
    assert "with t=2.5 and ids=ids.pt (sha256 " in record["preprocessing"]
    assert str(code.parent) not in json.dumps(record["options"])


@pytest.mark.medium
@pytest.mark.parametrize(
    ("net", "arguments"),
    [
        ("First", ["t=3"]),
        ("Second", ["t=3"]),
        ("OfDict", ["batch.image=image", "batch.weight=3"]),
    ],
)
def test_where_the_image_goes(
    net: str,
    arguments: list[str],
    draw_net: Callable[..., DrawnImage],
    code: Path,
    pixels: Tensor,
) -> None:
    """To the first parameter that has no value, or where NAME.KEY=image says."""
    drawn = draw_net(net, *arguments)
    with torch.no_grad():
        expected = load(f"{code}:{net}").conv(pixels) * 3
    torch.testing.assert_close(drawn.tensor(""), expected, atol=1e-5, rtol=1e-7)


@pytest.mark.medium
def test_a_tensor_is_the_same_for_every_image(code: Path, picture: Path) -> None:
    """A model that changes its argument in place does not change it for the next image."""
    model = load(f"{code}:Conditional")
    result = package.run(
        model,
        [Image.open(picture)] * 2,
        "Conditional",
        preset="none",
        tensors=True,
        forward_args={"t": 1, "mask": torch.ones(1, 1, 1, 1)},
    )
    first, second = [image.captures[0].tensor for image in result.images]
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (["t=image"], ["--transform", "user_net.py:image_alone"], "t: --transform"),
        (["t=1", "x=1"], ["--transform", "user_net.py:image_alone"], "x: --transform"),
        (["t=1", "x=1"], ["--input", "x=zeros:1,3,4,5"], "x: --input"),
    ],
)
def test_an_argument_has_one_value(
    arguments: list[str],
    options: list[str],
    message: str,
    featviz: Run,
    code: Path,
    picture: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a transform or --input gives is not given once more, nor is the image."""
    monkeypatch.chdir(code.parent)
    images = [] if "--input" in options else [picture]
    line = ["run", "user_net.py:Conditional", *images, *options, *flags(arguments)]
    refused(featviz(*line), 2, f"--forward-arg {message} gives x", "one of the two")


def test_the_image_is_the_first_of_the_outputs_of_a_transform() -> None:
    """Clips and images go before vectors, in the order of the function."""
    tensors = {
        "step": torch.zeros(1),
        "token": torch.zeros(1, 5),
        "x": torch.zeros(1, 3, 4, 4),
        "clip": torch.zeros(1, 3, 2, 4, 4),
    }

    def outputs_of(names: str) -> str:
        given = {name: tensors[name] for name in names.split()}
        transform = arguments.UserTransform.of(lambda image: given)
        return " ".join(transform.outputs(Image.new("L", (4, 4))))

    assert outputs_of("step token x clip") == "x clip step token"
    assert outputs_of("step token") == "token step"
    with pytest.raises(ImageError, match="gave a dict of step, expected"):
        outputs_of("step")


class Timed(nn.Module):
    """Notes how many images, steps and tokens it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, int]] = []
        self.act = nn.ReLU()

    def forward(self, x: Tensor, step: Tensor, token: Tensor) -> Tensor:
        self.seen.append((len(x), len(step), len(token)))
        maps: Tensor = self.act(x)
        return maps


def test_a_tensor_with_a_batch_of_one_grows_to_the_batch(picture: Path) -> None:
    """A vector of one number, too: there is one for each image."""
    model = Timed()
    arguments = {"step": torch.tensor([7]), "token": torch.zeros(1, 3, 4)}
    options: dict[str, Any] = {"preset": "none", "forward_args": arguments}
    package.audit(model, [Image.open(picture)] * 3, batch_size=2, **options)
    assert {(2, 2, 2), (1, 1, 1)} <= set(model.seen)
    assert all(len(set(counts)) == 1 for counts in model.seen)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["foo=1"], "--forward-arg foo: forward of Conditional takes x, t, ids, mask"),
        (["t=1", "t.k=2"], "--forward-arg t.k is given twice"),
        (["t.k=1", "t=2"], "--forward-arg t is given twice"),
        (["t.k=1", "t.k=2"], "--forward-arg t.k is given twice"),
        (
            ["t=zeros:99999,9999999"],
            "--forward-arg t=zeros:99999,9999999 has 999,989,900,001 values",
        ),
        (["t=open('x')"], "--forward-arg t=open('x') is no value"),
        (["t=none.npy"], "--forward-arg t: none.npy is no file"),
        (["t=.npy"], "--forward-arg t=.npy is no value"),
        (["t=bad.npy"], "--forward-arg t: bad.npy cannot be read: it is no array"),
        (
            ["t=bad.pt"],
            "--forward-arg t: bad.pt is no whole file of torch.save: it is no pickle",
        ),
    ],
)
def test_what_is_no_argument_gets_one_line(
    featviz: Run,
    code: Path,
    picture: Path,
    values: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A usage error with the value and the remedy; nothing is written."""
    monkeypatch.chdir(code.parent)
    for name in ("bad.npy", ".npy"):
        Path(name).write_bytes(b"no array")
    Path("bad.pt").write_bytes(b"no array")
    done = featviz("run", f"{code}:Conditional", picture, *flags(values), "-q")
    refused(done, 2, message)
    assert not Path("featviz-out").exists()


class Remembers(nn.Module):
    """Notes what it is given as `cache` and how full that is, and fills it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)
        self.seen: list[tuple[type, int]] = []

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        self.seen.append((type(cache), -1 if cache is None else len(cache)))
        if isinstance(cache, dict):
            cache["x"] = x
        elif isinstance(cache, list):
            cache.append(x)
        maps: Tensor = self.conv(x)
        return maps


@pytest.mark.medium
@pytest.mark.parametrize(
    ("value", "description"),
    [
        ({}, "cache={}"),
        ([7], "cache=[7]"),
        ({"k": 7}, "cache.k=7"),
        ("seven", "cache='seven'"),
    ],
    ids=["empty", "list", "dict", "text"],
)
def test_lists_and_dicts_reach_forward_as_they_are(
    value: Any, description: str, picture: Path
) -> None:
    """Empty ones, too, and anew for each call: what a model puts in is gone for the
    next image."""
    model = Remembers()
    before = copy.copy(value)
    out = picture.parent / "out"
    images = [Image.open(picture)] * 2
    options = {"forward_args": {"cache": value}, "preset": "none"}
    package.run(model, images, "conv", out, **options)
    assert len(model.seen) >= 2
    assert set(model.seen) == {(type(value), len(before))}
    assert value == before
    assert f"with {description}" in run_json(out)["preprocessing"]


@pytest.mark.parametrize(
    ("text", "expected"), [("t=-2.5e3", -2500.0), ("t=False", False), ("t=none", None)]
)
def test_words_and_numbers(text: str, expected: object) -> None:
    """As Python has them, whatever their case."""
    (argument,) = arguments.parse([text])
    assert argument.value == expected
    assert type(argument.value) is type(expected)


@pytest.mark.parametrize(
    ("text", "shape"),
    [("x=zeros:5", (1, 5)), ("x=zeros:1", (1,)), ("x=zeros:5:int64", (5,))],
)
def test_a_vector_of_floats_is_a_batch_of_one(
    text: str, shape: tuple[int, ...]
) -> None:
    """A single number is none, and integers may be indices."""
    (tensor,) = arguments.UserTransform.input([text])(None)
    assert tensor.shape == shape


def test_no_hook_stays_with_the_model(picture: Path) -> None:
    """Neither that of a transform of several outputs nor that of further arguments."""
    model = Timed()
    outputs = {"x": torch.zeros(1, 3, 4, 4), "step": torch.zeros(1)}
    options: dict[str, Any] = {
        "transform": lambda image: outputs,
        "forward_args": {"token": torch.zeros(1, 3, 4)},
    }
    package.run(model, Image.open(picture), "act", **options)
    assert set(model.seen) == {(1, 1, 1)}
    assert not model._forward_pre_hooks


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


def pixel_values(image: Path) -> np.ndarray:
    """float32 [3, H, W], 0 to 255."""
    return np.moveaxis(np.asarray(Image.open(image)).astype("f4"), -1, 0)


class Transformed(NamedTuple):
    """A run with a transform of the user's."""

    image: DrawnImage
    run: dict[str, Any]
    """run.json."""
    err: str


@pytest.fixture
def draw_transformed(
    featviz: Run, transforms: Path, image: Path, tmp_path: Path
) -> Callable[[str], Transformed]:
    """Draw the image, prepared by a function of the code; gradients, too."""

    def draw(function: str) -> Transformed:
        out = tmp_path / "out"
        call = ["run", f"{transforms}:Net", image, "--layers", "conv,Net", "--out", out]
        call += ["--transform", f"{transforms}:{function}", "--tensors", "npy"]
        done = featviz(*call, "--capture", "grad,output", "--target", "sum")
        assert done.code == 0, done.err
        return Transformed(DrawnImage(out / image.name), run_json(out), done.err)

    return draw


@pytest.mark.medium
@pytest.mark.parametrize(("function", "channels"), [("five", 2), ("named", 3)])
def test_the_model_gets_what_the_function_gives(
    function: str,
    channels: int,
    draw_transformed: Callable[[str], Transformed],
    image: Path,
) -> None:
    """A tensor of any number of channels, with or without the batch axis, and a dict of
    arguments, which reach forward by their names; gradients pass beside indices, which
    can have none."""
    transformed = draw_transformed(function)
    values = pixel_values(image) - 100
    expected = values.sum(0) + values[:2].sum(0)
    maps = np.load(transformed.image.folder / "001_conv" / "output.npy")
    assert "guess" not in transformed.err
    np.testing.assert_allclose(maps, np.stack([expected, expected])[None], rtol=1e-5)
    assert transformed.image.rows[""]["maps"] == channels


@pytest.mark.medium
def test_the_record_names_the_transform(
    draw_transformed: Callable[[str], Transformed], tmp_path: Path
) -> None:
    """Its file by name and digest, without its folder."""
    transformed = draw_transformed("five")
    digest = hashlib.sha256(TRANSFORMS.encode()).hexdigest()[:16]
    description = f"RGB, transform user_net.py:five (sha256 {digest})"
    assert transformed.image.manifest["input"]["preprocessing"] == description
    assert str(tmp_path) not in json.dumps(transformed.run)


@pytest.mark.medium
def test_input_png_shows_the_first_three_channels(
    draw_transformed: Callable[[str], Transformed], image: Path
) -> None:
    """Of five, their least value black."""
    shown = draw_transformed("five").image.input()
    values = np.moveaxis(pixel_values(image), 0, -1)
    expected = (values - values.min()) / (values.max() - values.min()) * 255
    assert shown.shape == (4, 6, 3)
    assert np.abs(shown - expected).max() <= 1


@pytest.mark.parametrize(
    ("function", "exit_code", "message"),
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
    exit_code: int,
    message: str,
    featviz: Run,
    transforms: Path,
    image: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The function is tried on an empty image before the run begins."""
    monkeypatch.chdir(transforms.parent)
    done = featviz("run", f"{transforms}:Net", image, "--transform", function)
    refused(done, exit_code, message)


@pytest.mark.medium
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
    empty = tmp_path / "empty.png"
    Image.new("RGB", (6, 4)).save(empty)
    options = ["--transform", f"{transforms}:{function}", "--out", tmp_path / "out"]
    done = featviz("run", f"{transforms}:Net", image, empty, *options)
    assert done.code == 3
    assert message in done.err
    assert complete(tmp_path / "out") == ["empty.png"]
