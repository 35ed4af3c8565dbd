"""The command line: streams, exit codes, configuration, and one clear line for bad input."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Outcome
from PIL import Image
from torch import nn
from torchvision import models

from featviz import __version__, cli
from featviz.drawing.drawer import Drawer
from featviz.images import decode

Run = Callable[..., Outcome]

HEAVY = ("torch", "torchvision", "numpy", "PIL", "matplotlib", "rich")

NETS = """
import torch
from torch import nn
from torch.nn import functional as F

class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.again = nn.Conv2d(4, 4, 3)
    def forward(self, x):
        x = F.relu(self.conv(x))
        return torch.relu(self.again(x)).relu_()

class Picky(nn.Module):
    def forward(self, x):
        if x.shape[-1] == 13:
            raise ValueError("no picture may be 13 wide")
        return x

def picky():
    return nn.Sequential(nn.Conv2d(1, 2, 1), nn.Sequential(nn.ReLU(), Picky()))

def grey(width=2):
    return nn.Sequential(nn.Conv2d(1, width, 3), nn.ReLU(inplace=True))

def stubborn():
    return nn.Sequential(nn.Conv2d(4, 2, 1))
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of factories; NETS:name."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "user_nets.py"
    path.write_text(NETS)
    return str(path)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three pictures, of which the second in order cannot be read."""
    path = tmp_path / "folder"
    path.mkdir()
    for name, size in (("a.png", (9, 8)), ("c.png", (13, 8))):
        Image.fromarray(np.arange(size[0] * size[1], dtype=np.uint8).reshape(size[::-1])).save(
            path / name
        )
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
    Image.fromarray(noise).save(path / "b.png")
    data = (path / "b.png").read_bytes()
    (path / "b.png").write_bytes(data[: len(data) // 2])
    return path


def refused(outcome: Outcome, code: int, message: str) -> None:
    """One error line, at most one hint, nothing else; nothing on stdout."""
    assert outcome.code == code, outcome.err
    assert outcome.out == ""
    lines = outcome.err.splitlines()
    assert re.match(f"error: .*{message}", lines[0]), outcome.err
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: ")), outcome.err


def files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def images_done(root: Path) -> list[str]:
    return sorted(p.parent.relative_to(root).as_posix() for p in root.rglob("manifest.json"))


# Help --------------------------------------------------------------------------------------


def modules_after(*arguments: str, **environment: str) -> tuple[str, set[str]]:
    """What a command line prints, and which heavy packages it has imported by its end."""
    code = (
        "import atexit, sys\n"
        f"heavy = {HEAVY!r}\n"
        "atexit.register(lambda: print(*[m for m in heavy if m in sys.modules], file=sys.stderr))\n"
        "from featviz.cli import main\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=True,
    )
    return done.stdout, set(done.stderr.split())


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["-h"], ["--version"], *([name, "--help"] for name in cli.COMMANDS)],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """Help and version come at once."""
    printed, heavy = modules_after(*arguments)
    assert printed
    assert not heavy


@pytest.mark.parametrize("words", ["featviz r", "featviz run --norm"])
def test_completion_imports_nothing_heavy(words: str) -> None:
    """Completing a command, or an option of one, does not wait for imports."""
    printed, heavy = modules_after(
        _FEATVIZ_COMPLETE="bash_complete",
        COMP_WORDS=words,
        COMP_CWORD=str(len(words.split()) - 1),
    )
    assert "plain,run" in printed or "plain,--normalize" in printed
    assert not heavy


def test_version(featviz: Run) -> None:
    """--version says the version on stdout."""
    assert featviz("--version") == Outcome(0, f"featviz, version {__version__}\n", "")


@pytest.mark.parametrize(
    "command", [[], ["run"], ["layers"], ["summary"], ["kernels"]], ids=" ".join
)
def test_help_has_examples(command: list[str], featviz: Run) -> None:
    """Every help has an example of a whole command line, and tells of both verbosities."""
    text = featviz(*command, "--help").out
    assert re.search(rf"Examples:\n +{' '.join(['featviz', *command])} \w+", text)
    assert not command or ("--quiet" in text and "--verbose" in text and "--config" in text)


def test_the_group_lists_every_command(featviz: Run) -> None:
    """--help has each command with its line."""
    text = featviz("--help").out
    assert all(re.search(rf"^  {n} +{re.escape(h)}$", text, re.M) for n, h in cli.COMMANDS.items())


# Bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["rnu"], 2, "No such command 'rnu'"),
        (["run"], 2, "Missing argument 'MODEL'"),
        (["run", "MODEL"], 2, "Missing argument 'IMAGES'"),
        (["layers"], 2, "Missing argument 'MODEL'"),
        (["run", "resnet81", "PICTURE"], 2, "torchvision has no model 'resnet81'"),
        (["layers", "resnet81"], 2, "torchvision has no model 'resnet81'"),
        (["run", "absent.pth", "PICTURE"], 2, r"no model file 'absent\.pth'"),
        (["run", "PICTURE", "PICTURE"], 1, r"picture\.png is no checkpoint: it is a PNG image"),
        (["run", "MODEL", "absent.jpg"], 2, r"no image 'absent\.jpg'"),
        (["run", "MODEL", "EMPTY"], 2, "no images in folder"),
        (["run", "MODEL", "no*such.png"], 2, r"no image matches 'no\*such\.png'"),
        (["run", "MODEL", "PICTURE", "--nrow", "0"], 2, "--nrow 0 is below 1"),
        (["run", "MODEL", "PICTURE", "--nrow", "x"], 2, ".*'x' is neither a whole number nor auto"),
        (["run", "MODEL", "PICTURE", "--max-maps", "0"], 2, "--max-maps 0 is below 1"),
        (["run", "MODEL", "PICTURE", "--padding", "-1"], 2, "--padding -1 is below 0"),
        (["run", "MODEL", "PICTURE", "--pad-value", "2"], 2, r"--pad-value 2\.0 is outside 0\.\.1"),
        (["run", "MODEL", "PICTURE", "--normalize", "maps"], 2, "--normalize 'maps'"),
        (["run", "MODEL", "PICTURE", "--cmap", "virdis"], 2, "--cmap 'virdis'"),
        (
            ["run", "MODEL", "PICTURE", "--background", "whit"],
            2,
            "--background 'whit' is no colour",
        ),
        (["run", "MODEL", "PICTURE", "--size", "9y9"], 2, ".*'9y9' is no size"),
        (["run", "MODEL", "PICTURE", "--size", "0"], 2, ".*'0' is no size"),
        (["run", "MODEL", "PICTURE", "--mean", "a,b"], 2, ".*'a,b' is not numbers"),
        (["run", "MODEL", "PICTURE", "--channels", "2"], 2, ".*'2' is not one of"),
        (["run", "MODEL", "PICTURE", "--device", "gpu"], 2, "--device 'gpu' is no device"),
        (["run", "MODEL", "PICTURE", "--model-arg", "3"], 2, ".*'3' is not KEY=VALUE"),
        (["run", "MODEL", "PICTURE", "--out", "PICTURE"], 2, r"--out .*picture\.png is the input"),
        (["layers", "NETS:stubborn"], 2, "the first convolution takes 4 channels"),
        (["layers", "NETS:absent"], 2, "there is no 'absent'"),
        (["run", "MODEL", "PICTURE", "--nor"], 2, "No such option.*--nor"),
    ],
)
def test_bad_input_ends_in_one_line(
    arguments: list[str],
    code: int,
    message: str,
    featviz: Run,
    tiny_file: Path,
    picture: Path,
    nets: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An `error:` line, at most a `hint:` line, no traceback, nothing on stdout or on disk."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    names = {"MODEL": tiny_file, "PICTURE": picture, "EMPTY": tmp_path / "empty", "NETS": nets}
    for name, path in names.items():
        arguments = [
            a.replace(name, str(path)) if a.isupper() or ":" in a else a for a in arguments
        ]
    refused(featviz(*arguments, "-q"), code, message)
    assert files(tmp_path / "here") == {}


def test_a_hostile_file_is_one_line_with_the_option(
    featviz: Run, picture: Path, tmp_path: Path
) -> None:
    """A checkpoint that would run code is exit 1, with the objects and how to allow them."""

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "marker"),))

    torch.save(Evil(), tmp_path / "evil.pth")
    outcome = featviz("run", tmp_path / "evil.pth", picture)
    refused(outcome, 1, r"evil\.pth needs \w+\.mkdir.*nothing was executed")
    assert "--allow-global" in outcome.err.splitlines()[1]
    assert not (tmp_path / "marker").exists()


def test_weights_that_do_not_fit_are_one_line(
    featviz: Run, tiny: nn.Module, nets: str, picture: Path, tmp_path: Path
) -> None:
    """Missing and unexpected keys in exit 1's single line."""
    torch.save(tiny.state_dict(), tmp_path / "weights.pth")
    outcome = featviz("run", tmp_path / "weights.pth", picture, "--arch", f"{nets}:Functional")
    refused(outcome, 1, r"0 of 4 tensors; missing conv\.weight.*; unexpected 0\.weight")


def test_a_corrupt_image_in_a_folder_leaves_the_others_complete(
    featviz: Run, nets: str, folder: Path, out: Path
) -> None:
    """Exit 3; the image is named on stderr and in run.json, and has no folder."""
    outcome = featviz("run", f"{nets}:grey", folder, "--out", out, "--layers", "Conv2d")
    assert outcome.code == 3
    assert re.search(r"^error: b\.png: .*b\.png cannot be read", outcome.err, re.M)
    assert "Traceback" not in outcome.err
    run = json.loads((out / "run.json").read_text())
    assert [failure["image"] for failure in run["failures"]] == ["b.png"]
    assert run["images"] == {"total": 3, "complete": ["a.png", "c.png"], "missing": []}
    assert images_done(out) == ["a.png", "c.png"] and not (out / "b.png").exists()


@pytest.mark.parametrize("name", ["b.png", "."])
def test_run_json_names_failures_without_absolute_paths(
    name: str, featviz: Run, nets: str, folder: Path, out: Path
) -> None:
    """No absolute path in a run directory, also where an image failed."""
    featviz("run", f"{nets}:grey", folder / name, "--out", out, "--layers", "Conv2d")
    run = (out / "run.json").read_text()
    assert json.loads(run)["failures"]
    assert str(folder) not in run


def test_run_json_has_no_absolute_path_of_the_model(
    featviz: Run, tiny: nn.Module, nets: str, picture: Path, tmp_path: Path, out: Path
) -> None:
    """A factory given by its file, as MODEL or as --arch, is recorded without its folder."""
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
    torch.save(module.state_dict(), tmp_path / "weights.pth")
    for model in ([f"{nets}:grey"], [tmp_path / "weights.pth", "--arch", f"{nets}:grey"]):
        outcome = featviz("run", *model, picture, "--layers", "ReLU", "--out", out, "--overwrite")
        assert outcome.code == 0, outcome.err
        assert str(tmp_path) not in (out / "run.json").read_text()


def test_a_single_corrupt_image_is_a_failure(
    featviz: Run, nets: str, folder: Path, out: Path
) -> None:
    """Exit 1 where no image is left; one line names it."""
    arguments = ("run", f"{nets}:grey", folder / "b.png", "--layers", "Conv2d", "--out", out)
    refused(featviz(*arguments, "-q"), 1, r"b\.png cannot be read")
    assert images_done(out) == []


@pytest.mark.parametrize("several", [True, False])
def test_a_model_that_raises_is_named_with_the_module(
    several: bool, featviz: Run, nets: str, folder: Path, out: Path
) -> None:
    """Exit 3 among others, 1 alone; the line names the module in which it failed."""
    (folder / "b.png").unlink()
    given = folder if several else folder / "c.png"
    outcome = featviz("run", f"{nets}:picky", given, "--out", out, "--layers", "Conv2d", "-q")
    refused(
        outcome,
        3 if several else 1,
        r"c\.png: the model failed in 1\.1 \(Picky\): no picture may be 13 wide",
    )
    assert images_done(out) == (["a.png"] if several else [])


def test_an_output_that_cannot_be_made_names_the_path(
    featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No permission: exit 1 with the path and the system's words."""

    def forbidden(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", forbidden)
    outcome = featviz(
        "run", tiny_file, picture, "--out", tmp_path / "locked", "--layers", "ReLU", "-q"
    )
    refused(outcome, 1, "locked cannot be written: Permission denied")


def test_an_output_below_a_file_names_it(featviz: Run, tiny_file: Path, picture: Path) -> None:
    """A parent that is a file is the system's error, with the path."""
    outcome = featviz("run", tiny_file, picture, "--out", picture / "x", "-q")
    refused(outcome, 1, r"picture\.png.* cannot be written: Not a directory")


def test_another_run_is_refused_and_overwritten_only_when_told(
    featviz: Run, tiny_file: Path, picture: Path, out: Path
) -> None:
    """--out with a run in it: exit 1 and untouched; with --overwrite as if it were new."""
    base = ("run", tiny_file, picture, "--out", out, "-q")
    assert featviz(*base, "--layers", "Conv2d").code == 0
    before = files(out)
    refused(featviz(*base, "--layers", "ReLU"), 1, "holds another run")
    assert files(out) == before
    assert featviz(*base, "--layers", "ReLU", "--overwrite").code == 0
    written = {name for name in files(out) if name.endswith("output.png")}
    assert written == {"picture.png/002_1/output.png"}


def test_a_folder_that_holds_no_run_is_never_emptied(
    featviz: Run, tiny_file: Path, picture: Path, out: Path
) -> None:
    """--overwrite does not delete what featviz did not write."""
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    outcome = featviz("run", tiny_file, picture, "--out", out, "--overwrite", "-q")
    refused(outcome, 1, "is not empty and holds no run of featviz")
    assert (out / "thesis.tex").read_text() == "years of work"


def test_a_misspelt_layer_lists_the_types(featviz: Run, tiny_file: Path, picture: Path) -> None:
    """Exit 2, the nearest name, and each type with its count."""
    outcome = featviz("run", tiny_file, picture, "--layers", "Conv2D", "-q")
    refused(outcome, 2, "no layer matches --layers 'Conv2D'")
    hint = outcome.err.splitlines()[1]
    assert "did you mean Conv2d?" in hint
    assert re.search(r"Conv2d\W+1\b", hint) and re.search(r"Linear\W+1\b", hint)


def test_a_relu_that_is_a_function_is_told(featviz: Run, nets: str, picture: Path) -> None:
    """--layers ReLU on a model without such modules says which function it calls, how often."""
    outcome = featviz("run", f"{nets}:Functional", picture, "--layers", "ReLU", "-q")
    refused(outcome, 2, "no layer matches --layers 'ReLU'")
    assert "the model calls the function relu 3 times" in outcome.err


# Streams -----------------------------------------------------------------------------------


def test_json_is_one_line_for_each_image_and_nothing_else(
    featviz: Run, nets: str, folder: Path, out: Path
) -> None:
    """stdout holds JSON lines in the order of the images, the failed one among them."""
    outcome = featviz("run", f"{nets}:grey", folder, "--out", out, "--layers", "Conv2d", "--json")
    lines = [json.loads(line) for line in outcome.out.splitlines()]
    assert [line["image"] for line in lines] == ["a.png", "b.png", "c.png"]
    assert [sorted(line) for line in lines] == [
        ["files", "folder", "image", "never_ran", "prediction", "skipped"],
        ["error", "image"],
        ["files", "folder", "image", "never_ran", "prediction", "skipped"],
    ]
    assert all((out / line["folder"] / f).is_file() for line in lines[::2] for f in line["files"])


def test_without_json_stdout_is_empty(
    featviz: Run, tiny_file: Path, picture: Path, out: Path
) -> None:
    """What is for people goes to stderr."""
    outcome = featviz("run", tiny_file, picture, "--out", out)
    assert (outcome.code, outcome.out) == (0, "")
    assert "pictures of 1 image in" in outcome.err


@pytest.mark.parametrize("extra", [[], ["--max-maps", "2", "--nrow", "2", "--scale", "3"]])
def test_a_dry_run_foretells_the_run(
    extra: list[str], featviz: Run, tiny_file: Path, folder: Path, out: Path
) -> None:
    """--dry-run writes nothing; its files, maps and megapixels are those of the real run."""
    (folder / "b.png").unlink()
    base = ["run", tiny_file, folder, "--out", out, "--layers", "Conv2d,ReLU,Linear", *extra]
    told = json.loads(featviz(*base, "--dry-run", "--json").out)
    assert not out.exists()
    assert featviz(*base).code == 0
    manifests = [json.loads(path.read_text()) for path in sorted(out.glob("*/manifest.json"))]
    captures = [capture for manifest in manifests for capture in manifest["captures"]]
    pixels = 0
    for path in out.rglob("output*.png"):
        with Image.open(path) as image:
            pixels += image.width * image.height
    maps = sum(len(capture.get("channels") or range(capture["maps"])) for capture in captures)
    assert told["images"] == 2 and told["layers"] == 3
    assert told["files"] == len(captures) == len(list(out.rglob("output*.png")))
    assert told["maps"] == maps
    assert told["megapixels"] == pytest.approx(pixels / 1e6, abs=6e-4)
    assert [f["layer"] for f in told["per_image"]] == ["0", "1", "4"]


def test_a_dry_run_tells_people_a_table(
    featviz: Run, tiny_file: Path, picture: Path, out: Path
) -> None:
    """Without --json, a line for each picture and a sum."""
    outcome = featviz("run", tiny_file, picture, "--layers", "0", "--out", out, "--dry-run")
    line, total = outcome.out.splitlines()
    assert re.match(r"0  output\.png  4 maps  \d+×\d+  ~\d+ kB$", line)
    assert total.startswith("1 image: 1 file of 1 layer, 4 maps, ")
    assert not out.exists()


def test_a_dry_run_refuses_what_the_run_would(
    featviz: Run, tiny_file: Path, picture: Path, out: Path
) -> None:
    """Options are checked as for a run."""
    base = ("run", tiny_file, picture, "--out", out, "--dry-run", "-q")
    refused(featviz(*base, "--normalize", "maps"), 2, "--normalize 'maps'")
    refused(featviz(*base, "--layers", "Nothing"), 2, "no layer matches --layers 'Nothing'")


def test_quiet_leaves_errors_alone(
    featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path
) -> None:
    """-q silences warnings and the summary, not errors."""
    base = ("run", tiny_file, picture, "--layers", "ReLU", "--out")
    assert "warning: preprocessing is a guess" in featviz(*base, tmp_path / "a").err
    assert featviz(*base, tmp_path / "b", "-q") == Outcome(0, "", "")
    assert featviz(*base, tmp_path / "c", "--quiet") == Outcome(0, "", "")
    assert featviz(*base, tmp_path / "c", "-q").err.startswith("error: ")


@pytest.mark.parametrize("option", ["-v", "--verbose"])
def test_verbose_adds_the_traceback(option: str, featviz: Run, nets: str) -> None:
    """-v shows where an error came from, after its line."""
    outcome = featviz("layers", f"{nets}:absent", option)
    assert outcome.code == 2
    assert outcome.err.startswith("error: ") and "Traceback" in outcome.err


def test_verbose_shows_what_failed_an_image(
    featviz: Run, nets: str, folder: Path, out: Path
) -> None:
    """-v has the traceback of a model that raised for one of several images."""
    outcome = featviz("run", f"{nets}:picky", folder, "--out", out, "--layers", "Conv2d", "-v")
    assert outcome.code == 3
    assert "ValueError: no picture may be 13 wide" in outcome.err and "Traceback" in outcome.err


# Configuration -----------------------------------------------------------------------------


def options_used(out: Path) -> dict[str, Any]:
    options: dict[str, Any] = json.loads((out / "run.json").read_text())["options"]
    return options


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "featviz.toml"
    path.write_text(text)
    return path


def test_values_come_from_the_config_and_the_command_line_wins(
    featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path, out: Path
) -> None:
    """A TOML value stands in for an option; one on the command line wins over it."""
    file = config(
        tmp_path,
        'layers = ["Conv2d", "ReLU"]\nnrow = 3\npadding = 5\nmean = [0.1, 0.2, 0.3]\n'
        'size = "40x50"\npad_value = 0.5\nexif = false\ncmap = "viridis"\nscale = "auto"\n',
    )
    outcome = featviz(
        "run", tiny_file, picture, "--out", out, "--config", file, "--padding", 1, "--scale", 2
    )
    assert outcome.code == 0, outcome.err
    used = options_used(out)
    expected = {"layers": "Conv2d,ReLU", "nrow": 3, "padding": 1, "mean": [0.1, 0.2, 0.3]}
    expected |= {"size": [40, 50], "pad_value": 0.5, "exif": False, "cmap": "viridis", "scale": 2}
    assert {name: used[name] for name in expected} == expected


def test_a_table_is_for_the_command_of_its_name(
    featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path, out: Path
) -> None:
    """[run] applies to run and wins over the top level; another's table does not concern it."""
    file = config(tmp_path, 'layers = "ReLU"\n[run]\nnrow = 7\nlayers = "Conv2d"\n[audit]\nx = 1\n')
    outcome = featviz("run", tiny_file, picture, "--out", out, "--config", file)
    assert outcome.code == 0, outcome.err
    assert (options_used(out)["nrow"], options_used(out)["layers"]) == (7, "Conv2d")


@pytest.mark.parametrize("many", [True, False])
def test_model_and_images_come_from_the_config(
    many: bool, featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path, out: Path
) -> None:
    """`model` and `images` stand for the arguments, as one path or a list."""
    paths = json.dumps([str(picture)] if many else str(picture))
    text = f"model = {json.dumps(str(tiny_file))}\nimages = {paths}\nout = {json.dumps(str(out))}"
    outcome = featviz("run", "--config", config(tmp_path, text), "--layers", "ReLU")
    assert outcome.code == 0, outcome.err
    assert images_done(out) == ["picture.png"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("paddin = 3", ".*has 'paddin', which featviz run lacks; did you mean padding"),
        ("[run]\nno_such_thing_at_all = 3", ".*has 'no_such_thing_at_all'.*one of .*padding"),
        ("padding = ", ".*cannot be read"),
        ('padding = "wide"', ".*'wide' is not a valid integer"),
        ('channels = "5"', ".*'5' is not one of"),
    ],
)
def test_a_config_with_mistakes(
    text: str, message: str, featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path
) -> None:
    """An unknown key names the nearest, bad TOML its place, a bad value what is taken."""
    refused(featviz("run", tiny_file, picture, "--config", config(tmp_path, text)), 2, message)


def test_a_config_that_is_not_there(featviz: Run, tiny_file: Path, picture: Path) -> None:
    """A missing file is a usage error."""
    refused(featviz("run", tiny_file, picture, "--config", "no.toml"), 2, ".*'no.toml' does not")


def test_quiet_in_the_config_is_quiet(
    featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path, out: Path
) -> None:
    """--config supplies any option, verbosity included."""
    file = config(tmp_path, "quiet = true")
    outcome = featviz("run", tiny_file, picture, "--layers", "0", "--out", out, "--config", file)
    assert outcome == Outcome(0, "", "")


# Lists of images on stdin ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("separator", "option"),
    [
        pytest.param(b"\n", [], marks=pytest.mark.slow),
        pytest.param(b"\r\n", [], marks=pytest.mark.slow),
        (b"\0", ["-0"]),
        pytest.param(b"\0", ["--null"], marks=pytest.mark.slow),
    ],
    ids=["lines", "crlf", "-0", "--null"],
)
def test_images_listed_on_stdin(
    separator: bytes, option: list[str], shell: Run, tiny_file: Path, picture: Path, out: Path
) -> None:
    """`-` reads paths, one a line, or NUL-separated with -0."""
    other = picture.with_name("a b\nc.png" if option else "a b.png")
    other.write_bytes(picture.read_bytes())
    names = [os.fsencode(picture), os.fsencode(other)]
    outcome = shell(
        "run", tiny_file, "-", *option, "--json", "--out", out, "--layers", "0",
        stdin=separator.join(names) + separator,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    found = [json.loads(line)["image"] for line in outcome.out.splitlines()]
    assert found == ["picture.png", other.name]


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def give(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return give


@pytest.mark.parametrize("separator", [b"\n", b"\r\n", b"\n\n"])
def test_a_list_of_lines(
    separator: bytes,
    featviz: Run,
    tiny_file: Path,
    picture: Path,
    out: Path,
    stdin: Callable[[bytes], None],
) -> None:
    """One path a line, whatever the line ends with; a path may hold blanks."""
    other = picture.with_name("a b.png")
    other.write_bytes(picture.read_bytes())
    stdin(separator.join([os.fsencode(picture), os.fsencode(other)]))
    outcome = featviz("run", tiny_file, "-", "--json", "--out", out, "--layers", "0")
    found = [json.loads(line)["image"] for line in outcome.out.splitlines()]
    assert found == ["picture.png", "a b.png"]


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_empty_list_is_a_usage_error(
    content: bytes, featviz: Run, tiny_file: Path, stdin: Callable[[bytes], None]
) -> None:
    """Nothing on stdin is no success."""
    stdin(content)
    refused(featviz("run", tiny_file, "-", "-q"), 2, "stdin lists no images")


def test_a_listed_image_that_is_missing_fails_alone(
    featviz: Run, tiny_file: Path, picture: Path, out: Path, stdin: Callable[[bytes], None]
) -> None:
    """A stale line in a list fails that image, not the run."""
    stdin(b"gone.png\n" + os.fsencode(picture) + b"\n")
    outcome = featviz("run", tiny_file, "-", "--out", out, "--layers", "ReLU", "-q")
    refused(outcome, 3, "gone.png")
    assert images_done(out) == ["picture.png"]


# Endings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [["--help"], pytest.param(["layers", "MODEL", "--json", "-q"], marks=pytest.mark.slow)],
    ids=["help", "layers"],
)
def test_a_closed_pipe_ends_quietly(arguments: list[str], tiny_file: Path) -> None:
    """Piped into what has stopped reading: no message, and no failure."""
    reader, writer = os.pipe()
    os.close(reader)
    code = "from featviz.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *(a.replace("MODEL", str(tiny_file)) for a in arguments)],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_bug_is_not_dressed_up(
    featviz: Run, tiny_file: Path, picture: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody expected passes the error boundary, and the image is not complete."""

    def broken(*args: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(Drawer, "draw", broken)
    with pytest.raises(RuntimeError, match="a bug of ours"):
        featviz("run", tiny_file, picture, "--layers", "0", "--out", out)
    assert not images_done(out)


def test_a_bug_shows_its_traceback() -> None:
    """The process ends with 1 and the traceback on stderr."""
    code = (
        "from featviz import cli\n"
        "def broken(ctx): raise RuntimeError('a bug of ours')\n"
        "cli.group.invoke = broken\n"
        "cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "layers"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" in done.stderr and "RuntimeError: a bug of ours" in done.stderr


def test_an_interrupt_is_130_and_leaves_what_is_complete(
    featviz: Run, nets: str, folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at the third image: exit 130, one word, the first image stays complete."""
    real = decode.decode

    def interrupted(sample: Any, *args: Any) -> Any:
        if sample.name == "c.png":
            raise KeyboardInterrupt
        return real(sample, *args)

    monkeypatch.setattr(decode, "decode", interrupted)
    outcome = featviz(
        "run", f"{nets}:grey", folder, "--out", out, "--layers", "Conv2d", "--size", "8", "-q"
    )
    assert outcome.code == 130
    assert outcome.err.strip().splitlines()[-1] == "error: interrupted"
    assert "Traceback" not in outcome.err
    assert images_done(out) == ["a.png"]
    assert not list(out.rglob("*.part"))


# layers ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    with torch.device("meta"):
        return models.resnet18()


def test_layers_as_json_lists_every_module(featviz: Run, resnet: nn.Module) -> None:
    """Index, name, type, parameters, shape and calls agree with the model's own modules."""
    outcome = featviz("layers", "resnet18", "--weights", "none", "--layers", "Conv2d", "--json")
    assert outcome.code == 0
    found = json.loads(outcome.out)
    rows = found["layers"]
    modules = list(resnet.named_modules())
    assert [(row["index"], row["name"], row["type"]) for row in rows] == [
        (index, name, type(module).__name__) for index, (name, module) in enumerate(modules)
    ]
    assert [row["parameters"] for row in rows] == [
        sum(p.numel() for p in module.parameters(recurse=False)) for _, module in modules
    ]
    assert found["total_parameters"] == sum(p.numel() for p in resnet.parameters()) == 11689512
    assert [row["selected"] for row in rows] == [isinstance(m, nn.Conv2d) for _, m in modules]

    seen: dict[str, list[list[int]]] = {name: [] for name, _ in modules}
    for name, module in modules:
        module.register_forward_hook(
            lambda m, args, output, name=name: seen[name].append(list(output.shape))
        )
    with torch.no_grad():
        resnet.eval()(torch.zeros(1, 3, 224, 224, device="meta"))
    assert {row["name"]: row["output_shape"] for row in rows} == {n: s[0] for n, s in seen.items()}
    assert {row["name"]: row["calls"] for row in rows} == {n: len(s) for n, s in seen.items()}


def test_the_table_has_a_line_for_each_module(featviz: Run, resnet: nn.Module) -> None:
    """Piped into grep, every name stands whole on its line, whatever the terminal's width."""
    outcome = featviz("layers", "resnet18", "--weights", "none", "--layers", "layer3.*.conv?", "-q")
    lines = outcome.out.splitlines()
    footer = lines.pop()
    names = [name for name, _ in resnet.named_modules() if name]
    words = [line.split() for line in lines]
    assert [name for name in names if not any(name in line for line in words)] == []
    chosen = [line[2] for line in words if line and line[0] == "*"]
    assert chosen == [name for name in names if re.fullmatch(r"layer3\..*\.conv.", name)]
    assert footer == "68 modules, 11,689,512 parameters; * 4 taken by the selectors"


def test_layers_of_a_model_that_cannot_be_run(featviz: Run, tmp_path: Path) -> None:
    """The modules are listed without shapes and calls, with a warning that says why."""
    path = tmp_path / "odd.pth"
    torch.save(nn.Sequential(nn.Conv2d(3, 2, 1), nn.Linear(5, 2)), path)
    outcome = featviz("layers", path, "--layers", "Linear", "--json")
    assert outcome.code == 0
    rows = json.loads(outcome.out)["layers"]
    assert [(row["type"], row["selected"]) for row in rows] == [
        ("Sequential", False),
        ("Conv2d", False),
        ("Linear", True),
    ]
    assert all(row["output_shape"] is None and row["calls"] is None for row in rows)
    assert re.search(r"^warning: no shapes: the model failed in 1 \(Linear\)", outcome.err, re.M)


def test_layers_refuses_a_misspelt_layer(featviz: Run, tiny_file: Path) -> None:
    """As for run: exit 2 and the types."""
    outcome = featviz("layers", tiny_file, "--layers", "Conv3d", "--json", "-q")
    refused(outcome, 2, "no layer matches --layers 'Conv3d'")
    assert "types here: " in outcome.err
