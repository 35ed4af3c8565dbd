"""--input: further arguments of forward, beside the image."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli.outcomes import Run, refused
from torch import nn

import featviz as package
from featviz.models import arguments
from featviz.models.load import ModelOptions, load_model
from featviz.models.preprocess import InputOptions

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


def drawn(featviz: Run, code: Path, picture: Path, net: str, *given: str) -> tuple[Path, nn.Module]:
    """The run directory with the raw output of `conv`'s parent, and the model of the same seed."""
    out = code.parent / "out"
    words = [part for text in given for part in ("--input", text)]
    common = ("--preset", "none", "--tensors", "npy", "--layers", f"conv,{net}", "--out", out)
    done = featviz("run", f"{code}:{net}", picture, *common, *words)
    assert done.code == 0, done.err
    model = load_model(ModelOptions(f"{code}:{net}"), InputOptions(preset="none"))
    return out, model.module


def picture_values(picture: Path) -> torch.Tensor:
    from PIL import Image

    pixels = np.asarray(Image.open(picture).convert("RGB"))
    return torch.from_numpy(pixels.astype("f4") / 255).permute(2, 0, 1)[None]


def test_numbers_files_and_zeros_reach_forward(featviz: Run, code: Path, picture: Path) -> None:
    """The output is that of the module called with the same arguments by hand."""
    x = picture_values(picture)
    mask = np.random.default_rng(0).random((1, 1, *x.shape[2:])).astype("f4")
    np.save(code.parent / "mask.npy", mask)
    torch.save(torch.tensor([[3, 4]]), code.parent / "ids.pt")
    given = ("t=2.5", f"ids={code.parent / 'ids.pt'}", f"mask={code.parent / 'mask.npy'}")
    out, module = drawn(featviz, code, picture, "Conditional", *given)
    with torch.no_grad():
        y = module.conv(x) * 2.5 + module.words.weight[[3, 4]].mean(0)[None, :, None, None]
    expected = (y * torch.from_numpy(mask) * 2).numpy()
    name = picture.name
    np.testing.assert_allclose(kept(out, name, "Conditional"), expected, atol=1e-5)


def test_run_json_says_what_was_given(featviz: Run, code: Path, picture: Path) -> None:
    """By the file's name and sha256, without its folder."""
    np.save(code.parent / "mask.npy", np.ones((1, 1, 1, 1), "f4"))
    given = ("t=10", "ids=zeros:1,7:int64", f"mask={code.parent / 'mask.npy'}")
    out, _ = drawn(featviz, code, picture, "Conditional", *given)
    record = json.loads((out / "run.json").read_text())
    words = "with t=10 and ids=zeros:1,7:int64 and mask=mask.npy (sha256 "
    assert words in record["preprocessing"]
    assert str(code.parent) not in json.dumps(record["options"])


def test_a_tensor_is_the_same_for_every_image(
    featviz: Run, code: Path, tmp_path: Path, picture: Path
) -> None:
    """A model that changes its argument in place does not change it for the next image."""
    again = tmp_path / "again.png"
    again.write_bytes(picture.read_bytes())
    done = featviz(
        *("run", f"{code}:Conditional", picture, again, "--preset", "none", "--tensors", "npy"),
        *("--layers", "Conditional", "--input", "t=1", "--input", "mask=ones:1,1,1,1"),
        *("--out", tmp_path / "out"),
    )
    assert done.code == 0, done.err
    first, second = (kept(tmp_path / "out", p.name, "Conditional") for p in (picture, again))
    np.testing.assert_array_equal(first, second)


def test_the_image_goes_to_the_first_parameter_that_is_not_given(
    featviz: Run, code: Path, picture: Path
) -> None:
    """forward(t, x) with t given gets the image as x."""
    out, module = drawn(featviz, code, picture, "Second", "t=3")
    with torch.no_grad():
        expected = module(3, picture_values(picture)).numpy()
    np.testing.assert_allclose(kept(out, picture.name, "Second"), expected, atol=1e-5)


def test_a_forward_of_one_dict(featviz: Run, code: Path, picture: Path) -> None:
    """NAME.KEY fills it, and image is the image."""
    given = ("batch.image=image", "batch.weight=2")
    out, module = drawn(featviz, code, picture, "OfDict", *given)
    with torch.no_grad():
        expected = module({"image": picture_values(picture), "weight": 2}).numpy()
    np.testing.assert_allclose(kept(out, picture.name, "OfDict"), expected, atol=1e-5)


def test_layers_summary_and_audit_pass_them_too(
    featviz: Run, code: Path, picture: Path, tmp_path: Path
) -> None:
    """Shapes, and a batch of two images, for which a first axis of 1 is repeated."""
    given = ("--input", "t=2", "--input", "ids=ones:1,3:int64", "--size", "8x8")
    listed = featviz("layers", f"{code}:Conditional", *given, "--json")
    shapes = {row["name"]: row["output_shape"] for row in json.loads(listed.out)["layers"]}
    assert shapes["words"] == [1, 3, 2] and shapes["conv"] == [1, 2, 8, 8]
    assert featviz("summary", f"{code}:Conditional", *given).code == 0
    (tmp_path / "b.png").write_bytes(picture.read_bytes())
    images = (picture, tmp_path / "b.png", "--out", tmp_path / "audit")
    done = featviz("audit", f"{code}:Conditional", *images, *given)
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["foo=1"], "--input foo: forward of Conditional takes x, t, ids, mask"),
        (["t"], "--input t is not NAME=VALUE"),
        (["t="], "--input t= is not NAME=VALUE"),
        (["t=open('x')"], r"--input t=open\('x'\) is no value"),
        (["t='text'"], "is no value"),
        (["t=zeros:99999,99999"], "has 9,999,800,001 values"),
        (["t=zeros:1:complex"], "there is no type complex"),
        (["t=none.npy"], "--input t: none.npy is no file"),
        (["t=bad.npy"], "--input t: bad.npy cannot be read: it is no array"),
        (["t=bad.pt"], "--input t: bad.pt is of the older format"),
        (["t=1", "t=2"], "--input t is given twice"),
        (["t=1", "t.a=2"], "--input t is given twice"),
        (["t.a=1", "t=2"], "--input t is given twice"),
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
    words = [part for text in given for part in ("--input", text)]
    refused(featviz("run", f"{code}:Conditional", picture, *words, "-q"), 2, message)
    assert not (code.parent / "featviz-out").exists()


def test_a_transform_and_an_input_of_one_name(featviz: Run, code: Path, picture: Path) -> None:
    """The function's dict and --input may both give arguments, though not the same one."""
    common = ("run", f"{code}:Conditional", picture, "--transform", f"{code}:image_alone")
    out = ("--out", code.parent / "out")
    refused(featviz(*common, "--input", "x=1", "-q", *out), 2, "--input x: --transform gives x")
    assert featviz(*common, "--input", "t=1", *out).code == 0


def test_a_missing_argument_names_the_option(featviz: Run, code: Path, picture: Path) -> None:
    """forward(x, t) seems to take two images: the hint says what else it may be."""
    done = featviz("run", f"{code}:Conditional", picture, "--out", code.parent / "out")
    assert done.code == 2 and "--input NAME=VALUE" in done.err


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


@pytest.mark.parametrize("given", [{}, [], [7], {"k": 7}, ()])
def test_lists_and_dicts_reach_forward_as_they_are(given: Any, picture: Path) -> None:
    """Empty ones, too, and anew for each call: what a model puts in is gone for the next image."""
    model, again = Remembers(), picture.with_name("again.png")
    again.write_bytes(picture.read_bytes())
    before = copy.copy(given)
    out, options = picture.parent / "out", {"forward_args": {"cache": given}, "preset": "none"}
    package.run(model, [picture, again], "conv", out, **options)
    assert len(model.seen) >= 2 and set(model.seen) == {(type(given), len(before))}
    assert given == before
    words = f"cache.k={given['k']}" if given == {"k": 7} else f"cache={given!r}"
    record = json.loads((out / "run.json").read_text())
    assert record["preprocessing"].endswith(f"with {words}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("t=1", 1), ("t=-2.5e3", -2500.0), ("t=true", True), ("t=False", False), ("t=none", None)],
)
def test_words_and_numbers(text: str, expected: object) -> None:
    """As Python has them, whatever their case."""
    (one,) = arguments.parse([text])
    assert one.value == expected and type(one.value) is type(expected)
