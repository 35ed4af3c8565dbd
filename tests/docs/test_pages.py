"""What the README and the pages of docs/ show works as it stands: commands, code,
links, tables."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Outcome, Run
from documents import PAGES, blocks, commands, furnish, read
from PIL import Image

from featviz.options import RunOptions, every_option
from featviz.options.commands import AuditOptions, DiffThresholds

SHOWN = [page for page in PAGES if commands(page)]
WITHOUT_DOWNLOAD = ["--weights", "none"]
OF_TORCHVISION = {
    "resnet18",
    "ssdlite320_mobilenet_v3_large",
    "lraspp_mobilenet_v3_large",
}
SMALL_INPUT = {"run", "look", "audit", "cam", "exemplars", "field", "layers"}


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what a clone has, and with models and images of the reader's own."""
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(words: list[str]) -> list[str]:
    """A command of torchvision's models without a download and on a small image; others
    as they are."""
    if OF_TORCHVISION.isdisjoint(words):
        return words
    size = ["--size", "64"] if words[0] in SMALL_INPUT else []
    return [*words, *WITHOUT_DOWNLOAD, *size]


def follow(
    line: str, folder: Path, featviz: Run, monkeypatch: pytest.MonkeyPatch
) -> Outcome:
    """Do what a line says; of an installation and of torchrun only what featviz does
    there. A featviz between pipes runs in this process."""
    shutil.rmtree(folder / "featviz-out", ignore_errors=True)
    done = Outcome(0, "", "")
    for command in re.sub(r"^torchrun .* -m ", "", line.split(" && ")[-1]).split(" | "):
        if command.startswith("featviz "):
            piped = io.TextIOWrapper(io.BytesIO(done.out.encode()))
            monkeypatch.setattr(sys, "stdin", piped)
            done = featviz(*small(shlex.split(command)[1:]))
        else:
            script = (
                f'featviz() {{ {shlex.quote(sys.executable)} -m featviz "$@";'
                f" }}\n{command}"
            )
            variables = {**os.environ, "HOME": str(folder), "PYTHONPATH": str(ROOT)}
            ran = subprocess.run(
                ["bash", "-euc", script],
                input=done.out,
                capture_output=True,
                text=True,
                env=variables,
                check=False,
            )
            done = Outcome(ran.returncode, ran.stdout, ran.stderr)
        if done.code:
            break
    return done


def is_test_command(line: str) -> bool:
    return "pytest" in line


def test_defaults_that_the_pages_tell_are_true() -> None:
    """`--tolerance` (1e-4) is the default of the option of that name."""
    declared = every_option(RunOptions, AuditOptions, DiffThresholds)
    told = [re.findall(r"`--([a-z-]+)` \(([\d.e-]+)\)", read(page)) for page in PAGES]
    assert sum(map(len, told)) >= 4
    for option, number in chain(*told):
        assert declared[option.replace("-", "_")].default in (
            None,
            float(number),
        ), option


NEEDS = {"parity": ("onnxruntime",), "figures": ("av",)}
"""Packages of extras that the commands of a page use."""


@pytest.mark.slow
@pytest.mark.parametrize("page", SHOWN)
def test_the_commands_of_a_page_work(
    page: str, clone: Path, featviz: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code and all its commands but the one that runs these tests, in order, in one
    folder; each ends with the exit code that is told, and what the page promises is
    there."""
    if any("| jq" in line for line, _ in commands(page)) and shutil.which("jq") is None:
        pytest.skip("a command of the page needs jq")
    for package in NEEDS.get(page, ()):
        pytest.importorskip(package)
    for block in blocks(page, "python"):
        run_code(block)
    for line, code in commands(page):
        if not is_test_command(line):
            done = follow(line, clone, featviz, monkeypatch)
            assert done.code == code, (line, done.err)
    MADE.get(page, lambda clone: None)(clone)


def check_readme(made: Path) -> None:
    """Twenty digits, the quick picture, eight grids, the report, the evidence for a five,
    and an audit."""
    assert (
        len([path for path in (made / "out-digits").iterdir() if path.is_dir()]) == 20
    )
    assert (made / "look-colour_cnn-spheres.png").is_file()
    assert (made / "maps/report/index.html").is_file()
    assert len(list((made / "maps/spheres.jpg").glob("*/output.png"))) == 8
    assert (made / "five.png").is_file()
    assert (made / "audit/apoz.png").is_file()


def check_audit(made: Path) -> None:
    """The proof says that nothing changes, since nothing is cut."""
    assert (
        json.loads((made / "gates" / "audit.json").read_text())["verify"][
            "largest_change"
        ]
        == 0
    )
    assert json.loads((made / "prune.json").read_text()) == {}


def check_exemplars(made: Path) -> None:
    """A sheet for every layer and class that the record names."""
    for out in (made / "featviz-exemplars", made / "classes"):
        rows = json.loads((out / "exemplars.json").read_text())["layers"]
        assert rows
        assert all((out / row["sheet"]).is_file() for row in rows)


def check_figures(made: Path) -> None:
    """The ten figures: six pictures of several tiles, an overlay of the image's own
    size, a PDF with its fonts, thirteen steps and sixteen frames."""
    for name in ("one-channel", "layers", "models", "cams", "components"):
        with Image.open(made / f"{name}.png") as picture:
            assert picture.width > 250
    over = made / "over" / "spheres.jpg"
    paths = (over / "input.png", over / "016_relu_up2" / "output.png")
    sizes = []
    for path in paths:
        with Image.open(path) as picture:
            sizes.append(picture.size)
    assert sizes[0] == sizes[1]
    assert (made / "before-after.png").is_file()
    assert b"/FontFile2" in (made / "figure.pdf").read_bytes()
    with Image.open(made / "training.gif") as training:
        assert training.n_frames == 13  # type: ignore[attr-defined]
    assert (made / "clip.mp4").stat().st_size > 1000


MADE = {
    "README": check_readme,
    "audit": check_audit,
    "exemplars": check_exemplars,
    "figures": check_figures,
}


def run_code(block: str) -> None:
    """Run a block of Python with a model and a batch, unless it is the text of a file
    or of Ray."""
    from torchvision import models

    if not block.startswith("# ") and "featviz.ray" not in block:
        model = models.resnet18() if "layer4" in block else None
        exec(block, {"model": model, "batch": torch.rand(1, 3, 64, 64)})


def test_the_code_for_ray_is_a_call_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """With arguments that it takes; tests/api/test_ray.py draws with workers."""
    import featviz.ray

    signature = inspect.signature(featviz.ray.run)
    calls = []
    monkeypatch.setattr(
        featviz.ray, "run", lambda *a, **k: calls.append(signature.bind(*a, **k))
    )
    for code in blocks("operations", "python"):
        exec(code)
    assert calls


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Every file that a page links or shows is there."""
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)|src=\"([^\"]+)\"", read(page))
    for link in (first or second for first, second in links):
        if not re.match(r"https?:", link):
            assert (PAGES[page].parent / link).exists(), link


def test_the_readme_is_a_first_visit() -> None:
    """At most 150 lines, pictures, the set-up in its place, and a link to every page
    that says something where no site is built."""
    generated = ("commands", "api")
    text = read("README")
    assert text.count("\n") <= 150
    assert text.count("docs/pictures/") >= 6
    pages = {
        f"docs/{page}.md"
        for page in PAGES
        if page not in ("README", "index", *generated)
    }
    assert pages <= set(re.findall(r"\]\((docs/\w[\w-]*\.md)\)", text))


def test_ci_runs_the_readmes_test_command() -> None:
    """.ci/run finds the command in the README, so a missing install step cannot hide."""
    (line,) = [line for line, _ in commands("README") if is_test_command(line)]
    assert line == "pip install -e '.[test]' && python -m pytest -n 2 --dist worksteal"
    section = read("README").split("<!-- test command -->\n```sh\n")[1]
    assert section.startswith(line)
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


def test_exit_codes_match_the_errors() -> None:
    """The table of the run directory's page has the codes that the errors carry."""
    from featviz.cli import CLOSED_PIPE, INTERRUPTED
    from featviz.errors import CHECK_FAILED, FeatvizError, UsageError

    found = re.findall(r"^\| (\d+) \|", read("run-directory"), re.MULTILINE)
    codes = {int(code) for code in found}
    errors = {FeatvizError.exit_code, UsageError.exit_code, CHECK_FAILED}
    assert {0, 3, INTERRUPTED, CLOSED_PIPE} | errors == codes


def test_every_config_is_shown() -> None:
    """Each file in configs/ that people run is named on some page."""
    shown = "".join(read(page) for page in PAGES)
    for path in (ROOT / "configs").glob("*.toml"):
        assert f"configs/{path.name}" in shown


def test_shipped_model_is_what_the_script_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Same architecture, one Sequential, and at most 400 KB."""
    monkeypatch.syspath_prepend(ROOT / "configs")
    path = ROOT / "configs" / "digits_cnn.pth"
    built = importlib.import_module("train_digits_cnn").build_model(32)
    assert str(torch.load(path, weights_only=False)) == str(built)
    assert path.stat().st_size <= 400 * 1024
