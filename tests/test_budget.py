"""The size of the project only falls: each limit below is lowered by the commit that makes room."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import DIGITS, DIGITS_MODEL, ROOT

LIMITS = {
    "lines of the package": 25808,
    "files of the package": 120,
    "functions of the package": 1244,
    "classes of the package": 176,
    "lines of pages, scripts and styles": 2123,
    "lines of the tests": 31066,
    "functions that an image passes": 98,
    "files that an image passes": 25,
    "functions that a command passes": 406,
    "files that a command passes": 58,
}

COUNT_CALLS = """
import atexit, collections, importlib.util, json, os, sys, threading
root = os.path.dirname(importlib.util.find_spec("featviz").origin) + os.sep
target = sys.argv[1]
calls = collections.Counter()

def count(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(root) and not code.co_name.startswith("<"):
        calls[code.co_filename.removeprefix(root) + ":" + code.co_qualname] += 1

@atexit.register
def save():
    sys.setprofile(None)
    with open(target, "w") as file:
        json.dump(calls, file)

threading.setprofile(count)
sys.setprofile(count)
from featviz.cli import main
from featviz.run import run as story
story.SAVED_EVERY = 1e9  # how often run.json is saved depends on the machine
sys.argv = ["featviz", *sys.argv[2:]]
main()
"""


def lines(paths: list[Path]) -> int:
    """Lines of some files, blank ones included."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def calls(images: int, folder: Path) -> Counter[str]:
    """How often each function is called, and each class made, by a run of the digits network."""
    target = folder / f"calls-{images}.json"
    command = ["run", DIGITS_MODEL, *sorted(DIGITS.glob("*.png"))[:images], "-q"]
    options = ["--layers", "Conv2d,ReLU", "--out", folder / f"run-{images}"]
    words = [str(word) for word in (target, *command, *options)]
    subprocess.run([sys.executable, "-c", COUNT_CALLS, *words], check=True)
    return Counter(json.loads(target.read_text()))


def within_limits(measured: dict[str, int]) -> None:
    """Fails with all figures that are above their limits."""
    assert {k: (n, LIMITS[k]) for k, n in measured.items() if n > LIMITS[k]} == {}


def test_the_project_does_not_grow() -> None:
    """Neither the package, nor what its pages are made of, nor the tests."""
    package = sorted((ROOT / "featviz").rglob("*.py"))
    nodes = [node for path in package for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    pages = [
        *(ROOT / "featviz/report").glob("assets/*"),
        *(ROOT / "featviz/report").glob("templates/*"),
    ]
    within_limits(
        {
            "lines of the package": lines(package),
            "files of the package": len(package),
            "functions of the package": sum(
                isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in nodes
            ),
            "classes of the package": sum(isinstance(node, ast.ClassDef) for node in nodes),
            "lines of pages, scripts and styles": lines(pages),
            "lines of the tests": lines([*(ROOT / "tests").rglob("*.py")]),
        }
    )


@pytest.mark.slow
def test_the_way_of_an_image_does_not_grow(tmp_path: Path) -> None:
    """Functions called more often for six images than for three are the way of an image."""
    few, many = (calls(n, tmp_path) for n in (3, 6))
    way = {name for name, count in many.items() if count > few[name]}
    within_limits(
        {
            "functions that an image passes": len(way),
            "files that an image passes": len({name.split(":")[0] for name in way}),
            "functions that a command passes": len(many),
            "files that a command passes": len({name.split(":")[0] for name in many}),
        }
    )
