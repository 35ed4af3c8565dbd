"""Digests of modules, functions and values: another one for what was edited, and for
nothing else."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from runs import run_json, tree
from torch import Tensor, nn

import featviz as fv
from featviz.models.arguments import digest as value_digest
from featviz.models.weights import digest
from models.loading import load

pytestmark = pytest.mark.usefixtures("imports_undone")


class Described(nn.Module):
    """A module with something to say in `extra_repr`."""

    def __init__(self, description: str) -> None:
        super().__init__()
        self.extra_repr = lambda: description


def with_mean(mean: float) -> nn.Module:
    norm = nn.BatchNorm2d(2)
    nn.init.constant_(norm.running_mean, mean)
    return norm


def holding(tensor: Tensor) -> nn.Module:
    """A module with this buffer."""
    module = nn.Module()
    module.register_buffer("values", tensor)
    return module


def quantised(number: float) -> Tensor:
    return torch.quantize_per_tensor(
        torch.full((2,), float(number)), 0.5, 0, torch.quint8
    )


class Shaped(nn.ParameterList):
    """Zeros of a shape that `repr` does not show."""

    def __init__(self, *shape: int) -> None:
        super().__init__([torch.zeros(shape)])

    def extra_repr(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("module", "other"),
    [
        (nn.LeakyReLU(0.01), nn.LeakyReLU(5.0)),
        (nn.Softmax(1), nn.Sequential(nn.Softmax(1))),
        (Described("depth=0x10"), Described("depth=0x20")),
        (Shaped(2, 3), Shaped(3, 2)),
        (with_mean(0), with_mean(0.5)),
        (holding(quantised(1)), holding(quantised(2))),
        (holding(torch.eye(3).to_sparse()), holding(2 * torch.eye(3).to_sparse())),
        (holding(torch.zeros(2)), holding(torch.zeros(2).int())),
    ],
    ids=[
        "setting",
        "structure",
        "repr",
        "shape",
        "buffer",
        "quantised",
        "sparse",
        "type",
    ],
)
def test_whatever_is_of_a_module_is_part_of_its_digest(
    module: nn.Module, other: nn.Module
) -> None:
    """Settings that `repr` shows, shapes of tensors of the same bytes, and buffers."""
    assert digest(module) == digest(deepcopy(module))
    assert digest(module) != digest(other)


class Packed(Tensor):
    """A tensor that consists of two others, as torchao's do."""

    whole: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor, bits: int = 8) -> Any:
        return Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype)

    def __init__(self, whole: Tensor, scale: Tensor, bits: int = 8) -> None:
        self.whole, self.scale, self.bits = whole, scale, bits

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, int]]:
        return ["whole", "scale"], {"bits": self.bits}

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].whole, args[0].scale, args[0].bits)
        raise NotImplementedError(func)


def packed(number: int, scale: float, bits: int = 8) -> nn.Module:
    module = nn.Conv2d(3, 2, 1, bias=False)
    whole = torch.full((2, 3, 1, 1), number, dtype=torch.int8)
    weight = Packed(whole, torch.tensor(scale), bits)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


def test_tensors_that_consist_of_others_count_by_these() -> None:
    """And by their settings, as quantised weights of torchao do."""
    packs = [packed(1, 0.5), packed(2, 0.5), packed(1, 0.25), packed(1, 0.5, bits=4)]
    assert digest(packs[0]) == digest(packed(1, 0.5))
    assert len(set(map(digest, packs))) == 4


def imported(path: Path, code: str) -> Any:
    """The code as a module of its own."""
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SOURCES = {
    "object": "class P:\n    def __call__(self, x):\n        return x * {}\nf = P()\n",
    "nested": "f = lambda x: [y * {} for y in x]\n",
    "default": "def f(x, by={}):\n    return x * by\n",
    "bound": """
def make(by):
    def f(x):
        return x * by
    return f
f = make({})
""",
    "partial": """
import functools
def g(x, by):
    return x
f = functools.partial(g, by={})
""",
}
"""Code of a function f, with a number to fill in."""


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_an_edited_function_has_another_digest(source: str, tmp_path: Path) -> None:
    """The same text imported twice has the same one."""

    def digest_of(folder: str, number: int) -> str | None:
        path = tmp_path / folder / "prep.py"
        path.parent.mkdir()
        return value_digest(imported(path, source.format(number)).f)

    first = digest_of("first", 2)
    assert first == digest_of("again", 2)
    assert first != digest_of("edited", 3)


@pytest.mark.parametrize("array", [torch.tensor, np.array])
def test_arrays_count_by_all_their_values(array: Callable[[Any], Any]) -> None:
    """Inside of others, whatever `repr` shows."""
    with np.printoptions(precision=3):  # as some libraries set them
        values = (0.1, 0.1 + 1e-7, [0.1])
        digests = {value_digest([{"t": array(value)}]) for value in values}
    assert len(digests) == 3


def test_the_type_of_a_tensor_counts() -> None:
    """Beside its values."""
    assert value_digest([torch.zeros(2)]) != value_digest([torch.zeros(2).int()])


def test_plain_values_count_by_what_they_are() -> None:
    """And not by which object has them."""
    values = [1, "ab", {"a": (1.5,)}]
    equal = [1, "".join("ab"), {"a": (1.5,)}]
    assert value_digest(values) == value_digest(equal)
    assert value_digest(values) != value_digest([1])


class Scale:
    """Multiplies."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def times(self, value: float) -> float:
        """The product."""
        return value * self.factor


def test_a_method_counts_with_its_object() -> None:
    """By the attributes of that; so does a partial by its arguments."""
    assert value_digest(Scale(2).times) == value_digest(Scale(2).times)
    assert value_digest(Scale(2).times) != value_digest(Scale(3).times)
    parts = [partial(max, 1), partial(max, 2), partial(max, 1, key=abs)]
    assert len(set(map(value_digest, parts))) == 3
    assert value_digest(partial(max, 1)) == value_digest(parts[0])


def test_the_order_of_a_set_in_the_code_does_not_count() -> None:
    """It differs from process to process."""
    texts = [f"lambda x: x in {{{names}}}" for names in ("'a', 'b'", "'b', 'a'", "'c'")]
    first, again, other = [value_digest(eval(text)) for text in texts]
    assert first == again
    assert first != other


def test_a_list_within_itself_has_a_digest() -> None:
    """It ends."""
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


@pytest.mark.medium
def test_edited_code_is_another_run(
    featviz: Run, code: Path, photos: Path, tmp_path: Path
) -> None:
    """gelu for relu changes no tensor and no name. run.json has the sha256 of the
    model's file; an address in `extra_repr` is no difference."""
    out = tmp_path / "out"
    weights = tmp_path / "weights.pth"
    torch.save(load(f"{code}:Net").state_dict(), weights)
    call = ["run", weights, "--arch", f"{code}:Net", photos, "--layers", "Conv2d"]
    call += ["--out", out, "--resume"]
    assert featviz(*call).code == 0
    assert "(2 were complete before)" in featviz(*call).err
    before = tree(out)
    code.write_text(CODE.replace("F.relu", "F.gelu"))
    done = featviz(*call)
    sha256 = hashlib.sha256(CODE.encode()).hexdigest()
    assert run_json(out)["model"]["code_sha256"] == sha256
    assert done.code == 1
    assert "holds another run: its model.code_sha256 is" in done.err
    assert tree(out) == before


def draw_resuming(slope: float, value: float, photos: Path, out: Path) -> list[bool]:
    """Draw by an activation of this slope what a transform makes of the photos; whether
    each was kept of a run before."""
    net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.LeakyReLU(slope))
    for parameter in net.parameters():
        nn.init.ones_(parameter)

    def fill(image: Any) -> Tensor:
        return torch.full((3, 8, 8), value)

    result = fv.run(net, photos, "0", out, size=8, transform=fill, resume=True)
    return [image.kept for image in result.images]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("slope", "value", "message"),
    [(5.0, 0.5, r"its model\.parameters is"), (0.01, 0.25, "its preprocessing is")],
)
def test_settings_of_a_module_and_a_transform_from_python(
    slope: float, value: float, message: str, photos: Path, tmp_path: Path
) -> None:
    """The slope of an activation, and a function of the same name that does something
    else, make another run."""
    out = tmp_path / "out"
    assert draw_resuming(0.01, 0.5, photos, out) == [False, False]
    assert draw_resuming(0.01, 0.5, photos, out) == [True, True]
    with pytest.raises(fv.errors.StoreError, match=message):
        draw_resuming(slope, value, photos, out)
