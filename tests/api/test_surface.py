"""The API as a whole: its names, its examples, its types, and what importing it costs."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import featviz as fv
from featviz.api import keywords
from featviz.models.load import ModelOptions
from featviz.models.preprocess import InputOptions
from featviz.pipeline.keywords import names_of
from featviz.pipeline.options import RunOptions
from featviz.records import CLASS_MAPS, REDUCTIONS, DrawOptions

from .every_function import use_all

FUNCTIONS = [name for name in fv.__all__ if name != "__version__"]
EXAMPLE = Path(__file__).with_name("every_function.py")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_an_example_that_holds(name: str) -> None:
    """And says what it takes, gives and raises."""
    function = getattr(fv, name)
    (example,) = doctest.DocTestFinder(recurse=False).find(function, name, globs={})
    runner = doctest.DocTestRunner()
    assert len(example.examples) >= 2
    assert runner.run(example).failed == 0
    text = str(function.__doc__)
    assert all(f"\n    {part}:\n" in text for part in ("Args", "Raises", "Example"))


def test_the_example_that_uses_every_function_runs(tmp_path: Path) -> None:
    """It names every function, and each result is one short line in angle brackets."""
    source = EXAMPLE.read_text("utf-8")
    assert [name for name in FUNCTIONS if f"fv.{name}(" not in source] == []
    for short in use_all(tmp_path):
        assert short[0] + short[-1] == "<>" and "\n" not in short and len(short) < 200


@pytest.mark.slow
def test_mypy_strict_is_content_with_the_example(tmp_path: Path) -> None:
    """And not because it sees nothing: a wrong keyword is an error."""
    mypy = pytest.importorskip("mypy.api")
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import featviz\nfeatviz.run('m', 'i', cmapp='x')\nfeatviz.audit('m')\n")
    flags = ["--strict", "--config-file", "", "--cache-dir", str(tmp_path / "cache")]
    out, _, code = mypy.run([*flags, "--follow-imports=silent", str(EXAMPLE), str(wrong)])
    assert code == 1 and '"cmapp"' in out and '"audit"' in out
    assert {line.split(":")[0] for line in out.splitlines() if ": error:" in line} == {str(wrong)}


def test_importing_a_subpackage_leaves_the_function() -> None:
    """`featviz.audit` is the function, whatever was imported before."""
    for name in ("audit", "diff", "exemplars", "report"):
        importlib.import_module(f"featviz.{name}")
        assert callable(getattr(fv, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fv.nothing  # type: ignore[attr-defined]


def test_importing_featviz_is_light() -> None:
    """No torch, numpy or Pillow before a name is used."""
    code = "import featviz, sys; dir(featviz); print({'torch', 'numpy', 'PIL'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def _names(kind: type) -> set[str]:
    return set(kind.__annotations__)


def test_the_typed_keywords_are_the_fields_of_the_records() -> None:
    """No field without a type, and no type without a field."""
    of_runs = {"titles", "figure", "first", "shared_basis", "format", "flat", "tensors"}
    assert _names(keywords.GridKeywords) | of_runs == {f.name for f in fields(DrawOptions)}
    assert _names(keywords.ModelKeywords) == names_of(ModelOptions)
    assert _names(keywords.InputKeywords) == names_of(InputOptions) | {"forward_args"}
    assert {"archive", "fail_fast", "jobs", "shard"} <= {f.name for f in fields(RunOptions)}
    reduce = get_type_hints(keywords.GridKeywords)["reduce"]
    assert all(repr(name) in str(reduce) for name in REDUCTIONS)
    assert set(get_args(keywords.CamMethod)) == set(CLASS_MAPS)
    assert get_args(keywords.Count)
