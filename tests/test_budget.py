"""What the code says only gets less, and plainer: a commit that makes room lowers a
limit below.

Code is measured by its syntax (`syntax_figures.py`); how many lines it takes does not
matter."""

from __future__ import annotations

import json
import operator
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from conftest import DIGITS, DIGITS_MODEL, ROOT
from syntax_figures import measure, within

PACKAGE_AT_MOST: dict[str, float] = {
    "nodes": 298005,
    "nodes a code line": 8.65,
    "functions over 300 nodes": 46,
    "functions of complexity over 15": 0,
    "complexity, 90th percentile": 8,
    "functions nested over 3 deep": 9,
    "pair assignments in 1,000 lines": 0.5,
    "ternaries in 1,000 lines": 16,
    "comprehensions in 1,000 lines": 28,
    "splats of literals": 0,
    "fixed tuples of three types": 0,
    "formatting switched off": 0,
    "vague names in 100": 0.4,
}
PACKAGE_AT_LEAST: dict[str, float] = {
    "comment lines in 1,000 lines": 60,
    "docstring lines a code line": 0.45,
}
PAGE_LINES = 3473
"""Lines of the templates, scripts and styles of the report."""
WAY_AT_MOST: dict[str, float] = {
    "functions that an image passes": 137,
    "files that an image passes": 27,
    "functions that a command passes": 759,
    "files that a command passes": 81,
}

COUNT_CALLS = """
import atexit, collections, importlib.util, json, os, sys, threading
root = os.path.dirname(importlib.util.find_spec("featviz").origin) + os.sep
calls = collections.Counter()

def count(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(root) and not code.co_name.startswith("<"):
        calls[code.co_filename.removeprefix(root) + ":" + code.co_qualname] += 1

def save(target):
    sys.setprofile(None)
    with open(target, "w") as file:
        json.dump(calls, file)

import torch, numba  # whose imports would take twice as long under the count
for target, *words in json.loads(sys.argv[1]):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    atexit.register(save, target)
    threading.setprofile(count)
    sys.setprofile(count)
    from featviz.cli import main
    from featviz.run import run as story
    story.SAVED_EVERY = 1e9  # how often run.json is saved depends on the machine
    sys.argv = ["featviz", *words]
    main()
"""


def lines(paths: list[Path]) -> int:
    """Lines of some files, blank ones included."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def calls(folder: Path, *numbers: int) -> list[Counter[str]]:
    """How often each function is called, and each class made, by runs of the digits
    network on so many images."""
    pictures = sorted(DIGITS.glob("*.png"))
    options = ["-q", "--jobs", "1", "--layers", "Conv2d,ReLU", "--out"]
    targets = [folder / f"calls-{number}.json" for number in numbers]
    runs = []
    for number, target in zip(numbers, targets, strict=True):
        command = ["run", DIGITS_MODEL, *pictures[:number], *options]
        runs.append([target, *command, folder / f"run-{number}"])
    text = json.dumps(runs, default=str)
    subprocess.run([sys.executable, "-c", COUNT_CALLS, text], check=True)
    return [Counter(json.loads(target.read_text())) for target in targets]


@pytest.mark.medium
def test_the_package_says_no_more_than_before() -> None:
    """Neither more syntax, nor more of it in a line or a function, nor with fewer
    reasons."""
    figures = measure(sorted((ROOT / "featviz").rglob("*.py")))
    within(PACKAGE_AT_MOST, figures.limited(), operator.le)
    within(PACKAGE_AT_LEAST, figures.wanted(), operator.ge)


def test_the_pages_do_not_grow() -> None:
    """Templates, scripts and styles of the report keep within their lines."""
    report = ROOT / "featviz" / "report"
    assert lines([*report.glob("assets/*"), *report.glob("templates/*")]) <= PAGE_LINES


@pytest.mark.slow
def test_the_way_of_an_image_does_not_grow(tmp_path: Path) -> None:
    """Functions called more often for six images than for three are the way of an
    image."""
    three_images, six_images = calls(tmp_path, 3, 6)
    per_image = {
        name for name, count in six_images.items() if count > three_images[name]
    }
    figures = {
        "functions that an image passes": len(per_image),
        "files that an image passes": len({name.split(":")[0] for name in per_image}),
        "functions that a command passes": len(six_images),
        "files that a command passes": len({name.split(":")[0] for name in six_images}),
    }
    within(WAY_AT_MOST, figures, operator.le)
