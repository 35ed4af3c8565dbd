"""What the README and the pages of docs/ show works as it stands: commands, code,
links, tables."""

from __future__ import annotations

import importlib.util
import inspect
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import ROOT, Outcome, Run
from documents import (
    PAGES,
    Block,
    blocks,
    command_blocks,
    commands,
    examples,
    furnish,
    read,
    save_files,
)
from PIL import Image
from pixels import pixels_of

import featviz as fv
from featviz import cli, errors
from featviz.options import RunOptions, every_option
from featviz.options.commands import AuditOptions, DiffThresholds

SHOWN = [page for page in PAGES if commands(page) or blocks(page, "python")]
WITHOUT_DOWNLOAD = ["--weights", "none"]
OF_TORCHVISION = {
    "resnet18",
    "ssdlite320_mobilenet_v3_large",
    "lraspp_mobilenet_v3_large",
}
SMALL_INPUT = {"run", "look", "audit", "cam", "exemplars", "field", "layers"}


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a clone has, and with the reader's models and images."""
    folder = tmp_path_factory.mktemp("furnished")
    furnish(folder)
    return folder


@pytest.fixture
def clone(furnished: Path, tmp_path: Path) -> Path:
    """The current folder, which is such a folder."""
    shutil.copytree(furnished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def small(arguments: list[str]) -> list[str]:
    """A command of torchvision's models without a download and on a small image; others
    as they are."""
    if OF_TORCHVISION.isdisjoint(arguments):
        return arguments
    size = ["--size", "64"] if arguments[0] in SMALL_INPUT else []
    return [*arguments, *WITHOUT_DOWNLOAD, *size]


def in_bash(command: str, stdin: str, folder: Path) -> Outcome:
    """Run a command in a shell, in which featviz is the clone's."""
    featviz = f'featviz() {{ {shlex.quote(sys.executable)} -m featviz "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-euc", featviz + command],
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(folder), "PYTHONPATH": str(ROOT)},
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def in_python(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """Run `python FILE ARGUMENTS` or `python -c CODE` in this process, which has imported
    torch."""
    code = arguments[1] if arguments[0] == "-c" else Path(arguments[0]).read_text()
    with monkeypatch.context() as patch:
        patch.syspath_prepend(Path.cwd())
        patch.setattr(sys, "argv", arguments)
        exec(code, {"__name__": "__main__"})
    # the next page has its own `net.py`
    sys.modules.pop("net", None)
    return Outcome(0, "", "")


def follow(
    line: str, folder: Path, featviz: Run, monkeypatch: pytest.MonkeyPatch
) -> Outcome:
    """Do what a line says; of an installation and of torchrun only what featviz does
    there. What is Python's runs in this process, also between pipes."""
    done = Outcome(0, "", "")
    commands_of_line = re.sub(r"^torchrun .* -m ", "", line.split(" && ")[-1])
    for command in commands_of_line.split(" | "):
        program, _, arguments = command.partition(" ")
        if program == "featviz":
            piped = io.TextIOWrapper(io.BytesIO(done.out.encode()))
            monkeypatch.setattr(sys, "stdin", piped)
            done = featviz(*small(shlex.split(arguments)))
        elif program == "python":
            done = in_python(shlex.split(arguments), monkeypatch)
        else:
            done = in_bash(command, done.out, folder)
        if done.code:
            break
    return done


def is_test_command(line: str) -> bool:
    """Whether a line runs these tests."""
    return "pytest" in line


def test_defaults_that_the_pages_name_are_true() -> None:
    """`--tolerance` (1e-4) is the default of the option of that name."""
    declared = every_option(RunOptions, AuditOptions, DiffThresholds)
    text = "".join(map(read, PAGES))
    defaults = re.findall(r"`--([a-z-]+)` \(([\d.e-]+)\)", text)
    assert len(defaults) >= 4
    for flag, number in defaults:
        default = declared[flag.replace("-", "_")].default
        assert default in (None, float(number)), flag


NEEDS = {"parity": "onnxruntime", "figures": "av"}
"""The package of an extra that the commands of a page use."""


def skip_without_programs(page: str) -> None:
    """Skip where a command of the page needs what is not installed."""
    if "| jq" in read(page) and shutil.which("jq") is None:
        pytest.skip("a command of the page needs jq")
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])


NUMBER = re.compile(r"\d+(?:\.\d+)?")


def agree(shown: str, printed: str) -> bool:
    """Whether two lines have the same words, and numbers within two per cent."""
    texts = [NUMBER.sub("#", " ".join(line.split())) for line in (shown, printed)]
    numbers = [list(map(float, NUMBER.findall(line))) for line in (shown, printed)]
    return texts[0] == texts[1] and numbers[0] == pytest.approx(numbers[1], rel=0.02)


def check_shown(shown: list[str], printed: str) -> None:
    """The lines that a page shows are printed, in that order; `...` leaves lines out."""
    rest = iter(printed.splitlines())
    for line in shown:
        assert line == "..." or any(agree(line, other) for other in rest), line


def bring_images(folder: Path, as_in_a_clone: bool) -> None:
    """Put the sample images there: small ones, unless the page shows what is printed of
    them."""
    images = folder / "sample_images"
    small_images = folder / "small_images"
    if as_in_a_clone and not small_images.exists():
        images.rename(small_images)
        shutil.copytree(ROOT / "sample_images", images)
    elif not as_in_a_clone and small_images.exists():
        shutil.rmtree(images)
        small_images.rename(images)


def follow_all(
    block: Block, clone: Path, featviz: Run, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Run the commands of a block but the one that runs these tests; gives what the last
    one prints."""
    printed = ""
    for line, code in block.commands:
        if not is_test_command(line):
            done = follow(line, clone, featviz, monkeypatch)
            assert done.code == code, (line, done.err)
            printed = done.out + done.err
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("page", SHOWN)
def test_the_commands_of_a_page_work(
    page: str, clone: Path, featviz: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code and all its commands but the one that runs these tests run in order, in
    one folder; each ends with its exit code, and what the page promises is there. The
    lines that stand below a block are those that its last command prints."""
    skip_without_programs(page)
    if page == "README":
        save_files(page, clone)
    for code_block in blocks(page, "python"):
        run_code(code_block)
    for block in command_blocks(page):
        bring_images(clone, as_in_a_clone=bool(block.shown))
        printed = follow_all(block, clone, featviz, monkeypatch)
        if block.shown:
            check_shown(block.shown, printed)
    if page in MADE:
        MADE[page](clone)


def check_readme(made: Path) -> None:
    """Pictures of a network by name and of one's own, eight grids, the reports, the
    evidence for a five, and an audit."""
    assert len(list((made / "maps/spheres.jpg").glob("*/output.png"))) == 8
    for name in (
        "look-resnet18-photo.png",
        "photo-maps/report/index.html",
        "look-model-photo.png",
        "look-weights-photo.png",
        "maps/report/index.html",
        "five.png",
        "audit/apoz.png",
    ):
        assert (made / name).is_file(), name


def check_audit(made: Path) -> None:
    """The proof says that nothing changes, since nothing is cut."""
    audit = json.loads((made / "gates" / "audit.json").read_text())
    assert audit["verify"]["largest_change"] == 0
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
        assert pixels_of(made / f"{name}.png").shape[1] > 250
    image = made / "over" / "spheres.jpg"
    overlay = pixels_of(image / "016_relu_up2" / "output.png")
    assert overlay.shape[:2] == pixels_of(image / "input.png").shape[:2]
    assert (made / "before-after.png").is_file()
    assert b"/FontFile2" in (made / "figure.pdf").read_bytes()
    with Image.open(made / "training.gif") as training:
        assert training.n_frames == 13
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

    if "captum" in block and importlib.util.find_spec("captum") is None:
        return
    if not block.startswith("# ") and "featviz.ray" not in block:
        model = models.resnet18() if "layer4" in block else None
        exec(block, {"model": model, "batch": torch.rand(1, 3, 64, 64)})


@pytest.mark.parametrize("page", ["README", "python"])
def test_the_tensors_that_a_page_names_are_there(page: str, clone: Path) -> None:
    """Its first snippet keeps them, and predicts a five."""
    assert (clone / "configs").is_dir()
    names: dict[str, Any] = {}
    exec(blocks(page, "python")[-1 if page == "README" else 0], names)
    assert names["result"].captures[1].tensor.shape == (1, 64, 14, 14)
    assert names["result"].images[0].prediction[0].text == "class 5 99.6 %"


def test_the_code_for_ray_is_a_call_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has arguments that the function takes; tests/api/test_ray.py draws with
    workers."""
    import featviz.ray

    run = mock.create_autospec(featviz.ray.run)
    monkeypatch.setattr(featviz.ray, "run", run)
    for code in blocks("operations", "python"):
        exec(code)
    assert run.called


def folder_of(line: str) -> str | None:
    """The folder that a command makes, if it refuses one that is there."""
    words = shlex.split(line)
    if words[0] != "featviz" or words[1] not in {
        "run",
        "audit",
        "exemplars",
        "kernels",
    }:
        return None
    if {"--config", "--dry-run", "--resume", "--shard"} & set(words):
        return None
    default = f"featviz-{words[1]}"
    return words[words.index("--out") + 1] if "--out" in words else default


def folders_of_commands(page: str) -> list[str | None]:
    """What the commands of a page make; None for those that make no folder."""
    folders = []
    for line, _ in commands(page):
        parts = re.findall(r"^featviz [^|&]+|(?<=[|&] )featviz [^|&]+", line)
        folders += [folder_of(part) for part in parts]
    return folders


def folders_of_code(page: str) -> list[str]:
    """What the Python of a page makes, but for the texts of files."""
    folders: list[str] = []
    for code in blocks(page, "python"):
        if not code.startswith("# "):
            folders += re.findall(r'out="([\w-]+)"', code)
    return folders


def test_pages_can_be_followed_one_after_the_other() -> None:
    """No command of a page makes a folder that another one has made."""
    made: Counter[str | None] = Counter()
    for page in PAGES:
        made.update(folders_of_commands(page))
        made.update(folders_of_code(page))
    del made[None]
    assert not [folder for folder, times in made.items() if times > 1]


@pytest.mark.parametrize("page", SHOWN)
def test_no_look_of_a_page_replaces_the_picture_of_another(page: str) -> None:
    """Of commands with the same model and image, one at most has no `--out`. A variant in
    the README's words has a file of its own."""
    looks = [line for line, _ in commands(page) if "featviz look" in line]
    pictures = []
    for look in looks:
        if "--out" not in look:
            words = shlex.split(look.rpartition("featviz look ")[2])
            pictures.append((words[0], words[1]))
    assert len(pictures) == len(set(pictures))
    variants = re.findall(r"\(`(--layers [^`]+)` draws", read(page))
    assert all("--out" in variant for variant in variants)


@pytest.mark.parametrize("page", ["tutorial", "layers"])
def test_a_page_explains_the_mark_of_a_taken_layer(page: str) -> None:
    """A page whose table of layers has a `*` says what it marks, in its words or in the
    table's last line."""
    assert re.search(r"A `\*` marks the layers|; \* \d+ taken by", read(page))


@pytest.mark.slow
@pytest.mark.parametrize("page", SHOWN)
def test_a_page_says_which_files_the_reader_brings(page: str, furnished: Path) -> None:
    """A file of a command that is not in a clone is named in the page's words, or code of
    the page makes it."""
    brought = {path.name for path in furnished.iterdir()} - {"configs", "sample_images"}
    words = re.sub(r"^```sh\n.*?^```$", "", read(page), flags=re.MULTILINE | re.DOTALL)
    said = set(re.split(r"[`\"/: ]", words))
    for line, _ in commands(page):
        used = set(re.split(r"[/: ]", line)) & brought
        assert used <= said, line


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Every file that a page links or shows is there."""
    for link in re.findall(r"(?:\]\(|src=\")([^)#\"]+)", read(page)):
        if not re.match(r"https?:", link):
            assert (PAGES[page].parent / link).exists(), link


def test_the_readme_is_a_first_visit() -> None:
    """It has at most 180 lines, pictures, and a link to every page."""
    text = read("README")
    assert text.count("\n") <= 180
    assert text.count("docs/pictures/") >= 6
    pages = PAGES.keys() - {"README", "index"}
    assert pages <= set(re.findall(r"\]\(docs/(\w[\w-]*)\.md\)", text))


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

    numbers = re.findall(r"^\| (\d+) \|", read("run-directory"), re.MULTILINE)
    codes = set(map(int, numbers))
    errors = {FeatvizError.exit_code, UsageError.exit_code, CHECK_FAILED}
    assert {0, 3, INTERRUPTED, CLOSED_PIPE} | errors == codes


def test_the_reference_has_an_example_of_each_command() -> None:
    """Its table has a row for each command that there is, with an example of it."""
    named = re.findall(r"^\| \[(\w+)\]", read("commands"), re.MULTILINE)
    used = [example.line.split()[1] for example in examples("commands")]
    assert sorted(named) == sorted(cli.COMMANDS)
    assert used == named


def test_the_reference_names_each_function_and_its_arguments() -> None:
    """Its table has a row for each function that there is, with arguments that it takes,
    and the example below uses it."""
    rows = re.findall(r"^\| `featviz\.(\w+)\((.*?)\)`", read("api"), re.MULTILINE)
    (example,) = blocks("api", "python")
    assert {name for name, _ in rows} == set(fv.__all__) - {"__version__"}
    for name, arguments in rows:
        taken = inspect.signature(getattr(fv, name)).parameters
        assert set(arguments.split(", ")) <= set(taken), name
        assert f"featviz.{name}(" in example or name == "Watcher"


def test_the_reference_names_each_error() -> None:
    """Its table has a row for each error that featviz raises."""
    named = re.findall(r"^\| `(\w+Error)` \|", read("api"), re.MULTILINE)
    declared = {name for name in vars(errors) if name.endswith("Error")}
    assert set(named) == declared - {"FeatvizError"}


def test_every_config_is_shown() -> None:
    """Each file in configs/ that people run is named on some page."""
    shown = "".join(read(page) for page in PAGES)
    for path in (ROOT / "configs").glob("*.toml"):
        assert f"configs/{path.name}" in shown


@pytest.mark.parametrize("name", ["digits_cnn", "pairs_vit"])
def test_shipped_model_is_what_the_script_makes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the same architecture, and at most 400 KB."""
    monkeypatch.syspath_prepend(ROOT / "configs")
    path = ROOT / "configs" / f"{name}.pth"
    built = importlib.import_module(f"train_{name}").build_model()
    assert str(torch.load(path, weights_only=False)) == str(built)
    assert path.stat().st_size <= 400 * 1024


@pytest.mark.medium
def test_the_shipped_transformer_finds_the_pairs(clone: Path, featviz: Run) -> None:
    """The names of its nine pictures say which digit is there twice."""
    done = featviz("run", "--config", "configs/pairs.toml", "--json", "--jobs", "1")
    images = [json.loads(line) for line in done.out.splitlines()]
    assert len(images) == 9
    for image in images:
        pair = Path(image["image"]).stem.split("-")[1]
        expected = 10 if pair == "none" else int(pair)
        assert image["prediction"][0]["index"] == expected
