"""Digests of modules, functions and values: another one for what was edited, and for
nothing else."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from runs import make_photos, run_json, tree
from torch import nn

import featviz as fv
from featviz.models.arguments import digest as value_digest
from featviz.models.load import load_model
from featviz.models.weights import digest
from featviz.options import InputOptions, ModelOptions

pytestmark = pytest.mark.usefixtures("imports_undone")

Function = Callable[[Any], Any]


class Told(nn.Module):
    """A module whose `extra_repr` gives what it was told."""

    def __init__(self, say: Callable[[], Any]) -> None:
        super().__init__()
        self.say = say

    def extra_repr(self) -> str:
        said: str = self.say()
        return said


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.LeakyReLU(0.01), nn.LeakyReLU(5.0)),
        (nn.Softmax(1), nn.Sequential(nn.Softmax(1))),
        (Told(lambda: "depth=0x10"), Told(lambda: "depth=0x20")),
    ],
)
def test_settings_of_a_module_are_part_of_its_digest(
    one: nn.Module, other: nn.Module
) -> None:
    """Those that `repr` shows, which are in no tensor."""
    assert digest(one) != digest(other)


def test_the_shape_of_a_tensor_is_part_of_its_digest() -> None:
    """Of two parameters of the same bytes."""
    one, other = (nn.ParameterList([torch.zeros(shape)]) for shape in ((2, 3), (3, 2)))
    one.extra_repr = other.extra_repr = str  # type: ignore[method-assign]
    assert digest(one) != digest(other)


class Packed(torch.Tensor):
    """A tensor that consists of two others, as torchao's do; `sealed` ones do not tell
    them."""

    whole: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, whole: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype)  # type: ignore[attr-defined]

    def __init__(self, whole: torch.Tensor, scale: torch.Tensor) -> None:
        self.whole, self.scale = whole, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        if self.scale.isnan():
            raise NotImplementedError
        return ["whole", "scale"], None

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].whole, args[0].scale)
        raise NotImplementedError(func)


def packed(number: int, scale: float) -> nn.Module:
    module = nn.Conv2d(3, 2, 1)
    whole = torch.full((2, 3, 1, 1), number, dtype=torch.int8)
    module.weight = nn.Parameter(
        Packed(whole, torch.tensor(scale)), requires_grad=False
    )
    nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return module


def test_tensors_that_consist_of_others_count_by_these() -> None:
    """Quantised weights of torchao have a digest; a tensor that tells nothing has none."""
    one, again, other, scaled = (
        packed(n, s) for n, s in ((1, 0.5), (1, 0.5), (2, 0.5), (1, 0.25))
    )
    assert digest(one) == digest(again)
    assert len({*map(digest, (one, other, scaled))}) == 3
    assert digest(packed(1, float("nan"))) is None


def test_a_model_without_a_digest_is_not_resumed(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of it may be one of other weights."""
    monkeypatch.setattr("featviz.models.weights.digest", lambda module: None)
    again = {"size": 8, "resume": True}
    fv.run(nn.Conv2d(3, 2, 1), photos, "Conv2d", tmp_path / "out", **again)  # type: ignore[arg-type]
    with pytest.raises(fv.errors.StoreError, match="this model's tensors do not tell"):
        fv.run(nn.Conv2d(3, 2, 1), photos, "Conv2d", tmp_path / "out", **again)  # type: ignore[arg-type]


def imported(path: Path, code: str) -> Any:
    """The code as a module of its own."""
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FORMS = {
    "object": "class P:\n    def __call__(self, x):\n        return x * {}\nf = P()\n",
    "nested": "f = lambda x: [y * {} for y in x]\n",
    "default": "def f(x, by={}):\n    return x * by\n",
    "bound": (
        "def make(by):\n    def f(x):\n        return x * by\n    return f\nf ="
        " make({})\n"
    ),
    "partial": (
        "import functools\ndef g(x, by):\n    return x\nf = functools.partial(g,"
        " by={})\n"
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_edited_function_has_another_digest(form: str, tmp_path: Path) -> None:
    """The same text imported twice has the same one."""
    of = []
    for index, by in enumerate(("2", "2", "3")):
        (tmp_path / str(index)).mkdir()
        path = tmp_path / str(index) / "prep.py"
        of.append(value_digest(imported(path, FORMS[form].format(by)).f))
    assert of[0] == of[1] != of[2]


def test_values_count_in_full() -> None:
    """Tensors and arrays inside of others by all their values, whatever `repr` shows."""
    for kind in (torch.tensor, np.array):
        with np.printoptions(precision=3):  # as some libraries set them
            texts = {value_digest([{"t": kind(v)}]) for v in (0.1, 0.1 + 1e-7, [0.1])}
        assert len(texts) == 3
    assert value_digest([torch.zeros(2)]) != value_digest([torch.zeros(2).int()])
    one, other = [1, "ab", {"a": (1.5,)}], [1, "".join("ab"), {"a": (1.5,)}]
    assert value_digest(one) == value_digest(other) != value_digest([1])
    endless: list[Any] = []
    endless.append(endless)
    assert value_digest(endless) == value_digest(endless)


CODE = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)
    def extra_repr(self):
        return f"by={object()}"
    def forward(self, x):
        return F.relu(self.conv(x))
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "user_net.py").write_text(CODE)
    return tmp_path / "user_net.py"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "photos", 2)


def test_edited_code_is_another_run(
    featviz: Run, code: Path, photos: Path, tmp_path: Path
) -> None:
    """gelu for relu changes no tensor and no name. run.json has the sha256 of the
    model's file; an address in `extra_repr` is no difference."""
    out, module = (
        tmp_path / "out",
        load_model(ModelOptions(f"{code}:Net"), InputOptions()).module,
    )
    torch.save(module.state_dict(), tmp_path / "weights.pth")
    words = [tmp_path / "weights.pth", "--arch", f"{code}:Net"]
    base = ["run", *words, photos, "--layers", "Conv2d", "--out", out, "--resume"]
    assert featviz(*base).code == 0
    assert "(2 were complete before)" in featviz(*base).err
    record, before = run_json(out), tree(out)
    code.write_text(CODE.replace("F.relu", "F.gelu"))
    assert record["model"]["code_sha256"] == hashlib.sha256(CODE.encode()).hexdigest()
    done = featviz(*base)
    assert done.code == 1 and "holds another run; its model.code_sha256 is" in done.err
    assert tree(out) == before


def test_settings_of_a_module_and_a_transform_from_python(
    photos: Path, tmp_path: Path
) -> None:
    """The slope of an activation, and a function of the same name that does something
    else."""

    def net(slope: float) -> nn.Module:
        net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.LeakyReLU(slope))
        nn.init.ones_(net[0].weight)  # type: ignore[arg-type]
        nn.init.zeros_(net[0].bias)  # type: ignore[arg-type]
        return net

    def filled(value: float) -> Callable[[Any], torch.Tensor]:
        return lambda image: torch.full((3, 8, 8), value)

    def run(slope: float, value: float) -> list[bool]:
        feeding = filled(value)
        found = fv.run(
            net(slope),
            photos,
            "0",
            tmp_path / "out",
            size=8,
            transform=feeding,
            resume=True,
        )
        return [image.kept for image in found.images]

    assert run(0.01, 0.5) == [False, False] and run(0.01, 0.5) == [True, True]
    with pytest.raises(fv.errors.StoreError, match=r"its model\.parameters is"):
        run(5.0, 0.5)
    with pytest.raises(fv.errors.StoreError, match="its preprocessing is"):
        run(0.01, 0.25)


def test_buffers_are_part_of_the_digest() -> None:
    """The statistics of a normalisation, which are no parameters."""
    one, other = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
    assert digest(one) == digest(other)
    other.running_mean.fill_(0.5)  # type: ignore[union-attr]
    assert digest(one) != digest(other)
