"""Digests of modules, functions and values: another one for what was edited, and for nothing
else."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from featviz.models import digests

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
        (nn.MaxPool2d(2), nn.MaxPool2d(2, stride=1)),
        (nn.Sequential(nn.Softmax(1)), nn.Sequential(nn.Softmax(-1))),
        (nn.Softmax(1), nn.Sequential(nn.Softmax(1))),
        (Told(lambda: "depth=0x10"), Told(lambda: "depth=0x20")),
    ],
)
def test_settings_of_a_module_are_part_of_its_digest(one: nn.Module, other: nn.Module) -> None:
    """Those that `repr` shows, which are in no tensor."""
    assert digests.of_module(one) != digests.of_module(other)


def test_equal_modules_have_one_digest() -> None:
    """Two of the same settings and weights, whatever their names in Python."""
    one = nn.Sequential(nn.Conv2d(1, 2, 3), nn.LeakyReLU(0.3))
    other = nn.Sequential(nn.Conv2d(1, 2, 3), nn.LeakyReLU(0.3))
    other.load_state_dict(one.state_dict())
    assert digests.of_module(one) == digests.of_module(other)
    nn.init.zeros_(other[0].weight)  # type: ignore[arg-type]
    assert digests.of_module(one) != digests.of_module(other)


@pytest.mark.parametrize(
    "say", [lambda: f"of={object()}", lambda: 1 / 0, lambda: "\udcff", lambda: None]
)
def test_what_a_module_says_of_itself_may_be_anything(say: Callable[[], Any]) -> None:
    """Addresses change nothing, an `extra_repr` that raises is none, odd characters are taken."""
    kept = [object() for _ in range(3)]  # the next object lies at another address
    first = digests.of_module(Told(say))
    kept.append(object())
    assert digests.of_module(Told(say)) == first


def imported(path: Path, code: str) -> Any:
    """The code as a module of its own."""
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FORMS = {
    "function": "def f(x):\n    return x * {}\n",
    "method": "class P:\n    def g(self, x):\n        return x * {}\nf = P().g\n",
    "object": "class P:\n    def __call__(self, x):\n        return x * {}\nf = P()\n",
    "class": "class f:\n    def __init__(self, x):\n        self.x = x * {}\n",
    "lambda": "f = lambda x: x * {}\n",
    "nested": "f = lambda x: [y * {} for y in x]\n",
    "default": "def f(x, by={}):\n    return x * by\n",
    "keyword": "def f(x, *, by={}):\n    return x * by\n",
    "bound": "def make(by):\n    def f(x):\n        return x * by\n    return f\nf = make({})\n",
    "partial": "import functools\ndef g(x, by):\n    return x\nf = functools.partial(g, by={})\n",
    "wrapped": (
        "def twice(g):\n    return lambda x: g(g(x))\ndef f(x):\n    return x * {}\nf = twice(f)\n"
    ),
    "decorated": (
        "import functools\ndef twice(g):\n    @functools.wraps(g)\n    def h(x):\n"
        "        return g(g(x))\n    return h\n@twice\ndef f(x):\n    return x * {}\n"
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_edited_function_has_another_digest(form: str, tmp_path: Path) -> None:
    """With its source; the same text imported twice has the same one."""
    of = [
        digests.of_function(imported(tmp_path / str(index) / "prep.py", FORMS[form].format(by)).f)
        for index, by in enumerate(("2", "2", "3"))
        if not (tmp_path / str(index)).mkdir()
    ]
    assert of[0] == of[1] != of[2]


@pytest.mark.parametrize("form", FORMS)
def test_a_function_without_source_is_told_by_its_bytecode(form: str) -> None:
    """As one that was typed at a prompt."""

    def typed(by: str) -> Function:
        names: dict[str, Any] = {"__name__": "prompt"}
        exec(compile(FORMS[form].format(by), f"<{by}{id(names)}>", "exec"), names)
        function: Function = names["f"]
        return function

    assert digests.of_function(typed("2")) == digests.of_function(typed("2"))
    assert digests.of_function(typed("2")) != digests.of_function(typed("3"))


def test_lambdas_are_told_by_themselves_not_by_their_line() -> None:
    """Two of one line differ, and what else stands in the line changes nothing."""
    one, other = (lambda x: x + 1), (lambda x: x + 2)
    again = [lambda x: x + 1, "resume=True"][0]
    assert digests.of_function(one) != digests.of_function(other)
    assert digests.of_function(one) == digests.of_function(again)  # type: ignore[arg-type]


def test_the_order_of_a_constant_set_changes_nothing() -> None:
    """It is another one in each process, where the set is of texts."""

    def function(x: int) -> bool:
        return x in {0, 8}

    def ordered(values: list[int]) -> Function:
        consts = tuple(
            frozenset(values) if isinstance(one, frozenset) else one
            for one in function.__code__.co_consts
        )
        return FunctionType(function.__code__.replace(co_consts=consts), {}, "<lambda>")

    one, other = ordered([0, 8]), ordered([8, 0])
    assert repr(frozenset([0, 8])) != repr(frozenset([8, 0]))
    assert digests.of_function(one) == digests.of_function(other)
    assert digests.of_function(one) != digests.of_function(ordered([0, 9]))


def test_functions_without_code_and_callable_objects() -> None:
    """A function of C by its name, a module of torch or a partial by its settings."""
    assert digests.of_function(math.sqrt) != digests.of_function(math.exp)
    assert digests.of_function(nn.Hardtanh(0, 1)) != digests.of_function(nn.Hardtanh(0, 2))
    assert digests.of_function(nn.Hardtanh(0, 1)) == digests.of_function(nn.Hardtanh(0, 1))
    halves = [functools.partial(math.pow, by) for by in (1, 2)]
    assert digests.of_function(halves[0]) != digests.of_function(halves[1])


def test_a_function_with_a_bound_tensor() -> None:
    """All of its values count, not those that `repr` shows."""

    def scaled(by: torch.Tensor) -> Function:
        return lambda image: image * by

    one, other = torch.zeros(5000), torch.zeros(5000)
    other[2500] = 1e-9
    assert digests.of_function(scaled(one)) == digests.of_function(scaled(one.clone()))
    assert digests.of_function(scaled(one)) != digests.of_function(scaled(other))


def test_values_in_full() -> None:
    """Plain ones as `repr` says them; tensors and arrays inside by all their values."""
    plain: list[Any] = [1, 2.5, "a", (1,), (), [], {}, {"a": [None, (1, 2)]}, {3}]
    assert list(map(digests.in_full, plain)) == list(map(repr, plain))
    for kind in (torch.tensor, np.array):
        assert repr([kind(0.12345678)]) == repr([kind(0.12345678)])
        texts = {digests.in_full([{"t": kind(v)}]) for v in (0.1, 0.1 + 1e-7, [0.1])}
        assert len(texts) == 3
    assert digests.in_full([torch.zeros(2)]) != digests.in_full([torch.zeros(2).int()])
    endless: list[Any] = []
    endless.append(endless)
    assert digests.in_full(endless) == "[[...]]"
