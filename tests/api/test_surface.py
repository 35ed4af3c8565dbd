"""The API as a whole: its names, its examples, its types, and what importing it costs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import featviz as fv

from .every_function import use_all

FUNCTIONS = [name for name in fv.__all__ if name != "__version__"]
EXAMPLE = Path(__file__).with_name("every_function.py")


QUICK = ("capture", "diff", "grid", "layers", "run")


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FUNCTIONS],
)
def test_every_function_has_an_example_that_holds(name: str) -> None:
    """Its docstring says what it takes, too."""
    function = getattr(fv, name)
    (example,) = doctest.DocTestFinder(recurse=False).find(function, name, globs={})
    assert len(example.examples) >= 2
    assert doctest.DocTestRunner().run(example).failed == 0
    text = inspect.getdoc(function)
    assert "\nArgs:\n" in text
    assert "\nExample:\n" in text


@pytest.mark.slow
def test_the_example_that_uses_every_function_runs(tmp_path: Path) -> None:
    """It names every function, and each result is one short line in angle brackets."""
    source = EXAMPLE.read_text("utf-8")
    assert [name for name in FUNCTIONS if f"fv.{name}(" not in source] == []
    for short in use_all(tmp_path):
        assert re.fullmatch("<.{,200}>", short)


def test_importing_a_subpackage_leaves_the_function() -> None:
    """`featviz.audit` is the function, whatever was imported before."""
    for name in ("audit", "diff", "exemplars", "report"):
        importlib.import_module(f"featviz.{name}")
        assert callable(getattr(fv, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fv.nothing  # type: ignore[attr-defined]


def test_importing_featviz_is_light() -> None:
    """Neither torch nor numpy nor Pillow is imported before a name is used."""
    code = "import featviz, sys; dir(featviz); print(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {"torch", "numpy", "PIL"}.isdisjoint(done.stdout.split())
