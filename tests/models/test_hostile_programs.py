"""Hostile .pt2 files: nothing in them runs, hangs or fills the memory."""

from __future__ import annotations

import contextlib
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Outcome
from exported import CONSTANTS, INPUTS, PROGRAM, packed, records
from program_archives import ELSEWHERE, HOSTILE, ZIPS, evil_inputs, made
from program_documents import BROKEN, HARMLESS, swapped
from torch import nn

from featviz.errors import LoadError
from featviz.models.files import exported, exported_archive, exported_sizes

pytestmark = pytest.mark.usefixtures("deadline")


def _refused(path: Path) -> LoadError:
    """The one line that refuses a file; nothing has run."""
    with pytest.raises(LoadError) as caught:
        exported.read(path)
    assert caught.value.message.isprintable() and path.name in caught.value.message
    assert not path.with_name("marker").exists()
    return caught.value


def _careless(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    with contextlib.suppress(Exception):
        torch.export.unflatten(torch.export.load(path))(torch.zeros(1, 3, 16, 20))


@pytest.mark.parametrize("name", [*HOSTILE, *ELSEWHERE])
def test_the_hostile_archives_are_armed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them does leave its marker where it is loaded and run without care."""
    if name == "an opaque constant" and torch.__version__ < "2.13":
        pytest.skip("torch 2.12 loads no opaque constants")
    path = made((HOSTILE | ELSEWHERE)[name][0], tmp_path)
    _careless(path, tmp_path, monkeypatch)
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", [*HOSTILE, *ELSEWHERE])
def test_nothing_in_a_hostile_archive_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says what it holds and the way out; nothing has run, and nothing is imported."""
    make, what = (HOSTILE | ELSEWHERE)[name]
    path = made(make, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("evil_module", None)
    error = _refused(path)
    assert what in error.message and "nothing was executed" in error.message
    assert "--trust" in str(error.hint)
    assert "evil_module" not in sys.modules


def _shards(path: Path) -> Path:
    index = path.with_name("model.index.json")
    index.write_text(json.dumps({"weight_map": {"a": path.name}}))
    return index


@pytest.mark.parametrize("name", ELSEWHERE)
def test_no_way_leads_to_a_hostile_archive(
    name: str, tmp_path: Path, picture: Path, featviz: Callable[..., Outcome]
) -> None:
    """Called .pth, as a model, as weights, through an index: refused in one line everywhere."""
    path = made(ELSEWHERE[name][0], tmp_path).rename(tmp_path / "evil.pth")
    for command in (
        ("layers", path),
        ("run", path, picture, "--out", tmp_path / "out"),
        ("identify", path),
        ("layers", "squeezenet1_1", "--weights", path),
        ("layers", path, "--arch", "squeezenet1_1"),
        ("identify", _shards(path)),
    ):
        done = featviz(*command)
        assert done.code == 1 and done.err.startswith("error: evil.pth cannot be loaded: ")
        assert "Traceback" not in done.err and not (tmp_path / "marker").exists()


def test_example_inputs_are_never_read(tmp_path: Path) -> None:
    """A program with evil example inputs is the program without them."""
    path = made(evil_inputs, tmp_path)
    with exported_archive.rewritten(path) as file, zipfile.ZipFile(file) as archive:
        assert archive.read("archive/" + INPUTS) == b""
    assert exported.read(path).module(torch.zeros(1, 3, 16, 20)).shape == (1, 2, 16, 20)
    assert not (tmp_path / "marker").exists()


def test_trust_skips_the_check(tmp_path: Path) -> None:
    """With --trust torch reads what it will: here it runs the example inputs."""
    path = made(evil_inputs, tmp_path)
    assert exported.read(path, unsafe=True).module is not None
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", ZIPS)
def test_archives_that_readers_may_read_in_two_ways(name: str, tmp_path: Path) -> None:
    """Whatever is not as torch.export.save writes it is refused, and nothing has run."""
    make, words = ZIPS[name]
    assert words in _refused(make(tmp_path / "evil.pt2")).message


@pytest.mark.parametrize("name", BROKEN)
def test_programs_that_run_or_hang_or_fill_the_memory(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line, before torch has seen anything of it; the seed and the modes stay as they are."""
    make, words = BROKEN[name]
    seed = torch.initial_seed()
    error = _refused(made(make, tmp_path))
    assert words in error.message and len(error.message) < 600
    assert "Traceback" not in capfd.readouterr().err
    assert torch.initial_seed() == seed and torch.is_grad_enabled()
    assert type(nn.Module.forward).__name__ == "function"


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_not_needed_never_reaches_torch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program gives what it gave, and the archive that torch reads has no trace of it."""
    monkeypatch.chdir(tmp_path)
    path = made(HARMLESS[name], tmp_path)
    clean = exported.read(packed(tmp_path / "clean.pt2", records())).module
    image = torch.randn(1, 3, 16, 20)
    assert torch.equal(exported.read(path).module(image), clean(image))
    with exported_archive.rewritten(path) as file, zipfile.ZipFile(file) as archive:
        names = {member.partition("/")[2] for member in archive.namelist()}
        text = archive.read(f"archive/{PROGRAM}").decode()
    assert {name for name in names if name.startswith(("extra", "data/c"))} == {CONSTANTS}
    assert "weight_99" not in str(names) and "os" not in text.replace("cos", "").split("'")
    assert not {"custom", "source_fn_stack", "evil"} & set(_keys(json.loads(text)))
    assert not (tmp_path / "marker").exists()


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _keys(item)
    elif isinstance(value, list):
        for item in value:
            yield from _keys(item)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target", "torch.serialization.os.mkdir"),
        ("target", "torch.ops.load_library"),
        ("target", "torch.ops.aten.save.default"),
        ("target", "torch.ops.image.write_file.default"),
        ("target", "torch.ops.higher_order.flat_apply"),
        ("target", "torch.ops.aten.relu.default.__call__"),
        ("target", "torchX.hub.load"),
        ("target", "_operator.call"),
        ("target", "_operator.attrgetter"),
        ("target", "_operatorX.call"),
        ("target", "math.__loader__.load_module"),
        ("target", "#evil:op"),
        ("parameter_name", 'conv.weight")+print("x'),
        ("name", "x = 1\nimport os"),
        ("name", "x;y"),
        ("nn_module_stack", 'L__self__,,a;L__self__x,x"),evil("x,b'),
        ("nn_module_stack", "L__self__,a\\b,c"),
        ("stack_trace", "# x\revil()"),
        (
            "in_spec",
            '[1, {"type": "collections.namedtuple", "context": "null", "children_spec": []}]',
        ),
        ("in_spec", '[1, {"type": "builtins.dict", "context": "[{}]", "children_spec": []}]'),
        ("in_spec", "[2, 3]"),
        ("in_spec", "nonsense"),
    ],
)
def test_one_string_out_of_place_refuses_the_archive(key: str, value: str, tmp_path: Path) -> None:
    """Each string is compared with what torch.export.save writes under its key."""
    error = _refused(made(swapped(key, value), tmp_path))
    assert "could run any code; nothing was executed" in error.message


@pytest.mark.parametrize(
    "text",
    [
        "exec",
        "exec(1)",
        "Symbol('s0').__class__",
        "s0.a",
        "s0[0]",
        "(lambda: 0)()",
        "[s0]",
        "Add('exec(1)')",
        "Add('a.b')",
        "Symbol(f'{s0}')",
        "(s0 := 1)",
        "Integer(1)(2)",
        "s0 if s0 else s0",
        "s0; s0",
        "2*s77 + 1",
        "",
    ],
)
def test_sizes_that_are_no_arithmetic(text: str) -> None:
    """Sizes are evaluated as Python by sympy, so nothing but arithmetic on symbols passes."""
    with pytest.raises(ValueError, match=r"."):
        exported_sizes.rewritten(text)


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('s77', positive=True, integer=True)",
        "Add(FloorDiv(Add(Symbol('s0', integer=True), Integer(-1)), Integer(8)), Integer(1))",
        "Pow(Max(Integer(1), Symbol('u0')), Integer(2))",
        "Mul(Rational(1, 2), Symbol('s0', positive=True, integer=True))",
        "Float('0.5', precision=53)",
        "StrictLessThan(Symbol('s0', positive=True, integer=True), Integer(7))",
        "true",
    ],
)
def test_sizes_that_torch_writes(text: str) -> None:
    """Expressions keep their value; sympy's is the same."""
    import sympy
    from torch.utils._sympy import functions

    plain = {f"{kind}{n}": sympy.Symbol(f"{kind}{n}") for kind in "su" for n in (0, 1, 77)}
    values = {name: n + 5 for n, name in enumerate(plain)}

    def value(words: str) -> object:
        known = {"FloorDiv": functions.FloorDiv, "Max": sympy.Max, **plain}
        expression = sympy.sympify(words, locals=known)
        return expression.subs({s: values[s.name] for s in expression.free_symbols})

    again = exported_sizes.rewritten(text)
    assert exported_sizes.rewritten(again) == again
    assert value(again) == value(text)


def test_no_other_operator_of_aten_takes_a_file(tmp_path: Path) -> None:
    """Of all operators with a string argument, the two that name files are the two refused."""
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")]
    names = {s.name.removeprefix("aten::") for s in schemas if "file" in str(s)}
    assert names == {"from_file", "save"}
    for name in names:
        target = f"torch.ops.aten.{name}.default"
        assert f"target '{target}'" in _refused(made(swapped("target", target), tmp_path)).message
    good = made(swapped("target", "torch.ops.aten.conv2d.default"), tmp_path)
    assert exported.read(good).module is not None
