"""Whole models of classes that a script of the user's defines."""

from __future__ import annotations

import contextlib
import runpy
import shutil
from pathlib import Path

import pytest
from cli.outcomes import Run, refused
from conftest import Outcome

from featviz.errors import FeatvizError
from models.loading import load

pytestmark = pytest.mark.usefixtures("imports_undone")

SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)
    def forward(self, x):
        return self.conv(x)

if __name__ == "__main__":
    torch.save(Net(), "net.pth", _use_new_zipfile_serialization=%s)
"""


@pytest.fixture(scope="module", params=[True, False], ids=["zip", "legacy"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a script has left that saved a model of its own class, which is `__main__.Net`."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "user_train.py").write_text(SCRIPT % request.param)
    with contextlib.chdir(folder):
        runpy.run_path("user_train.py", run_name="__main__")
    return folder


@pytest.fixture
def script(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of it for one test, which is not the current one."""
    folder, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    shutil.copytree(saved, folder)
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    return folder


@pytest.mark.parametrize("options", [{"trust": True}, {"allow_globals": ("__main__.Net",)}])
@pytest.mark.parametrize("place", ["beside", "here"])
def test_the_class_of_a_script_is_found(
    place: str, options: dict[str, object], script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the user trusts it, `__main__.Net` comes from the file that defines it, in the current
    folder or beside the model; its weights are those that were saved."""
    if place == "here":
        (script / "user_train.py").rename(Path.cwd() / "user_train.py")
    module = load(script / "net.pth", **options)
    assert type(module).__name__ == "Net"
    assert type(module).__module__.startswith("featviz_user_user_train")
    assert module.conv.out_channels == 2


@pytest.mark.parametrize("options", [{"trust": True}, {"allow_globals": ("__main__.Net",)}])
@pytest.mark.parametrize("files", [0, 2])
def test_a_class_that_no_file_or_several_define(
    files: int, options: dict[str, object], script: Path
) -> None:
    """The message names the class, the files and the folders; no file is picked by chance."""
    code = (script / "user_train.py").read_text()
    (script / "user_train.py").unlink()
    for number in range(files):
        (script / f"user_{number}.py").write_text(code)
    found = "user_0.py, user_1.py" if files else "no .py file"
    with pytest.raises(FeatvizError, match=f"'Net' was defined in a script, and {found} in .*work"):
        load(script / "net.pth", **options)


def test_the_error_shows_the_command_to_go_on_with(
    featviz: Run, script: Path, picture: Path, tmp_path: Path
) -> None:
    """The command in the hint, run as it stands, draws the model."""
    arguments = ("run", script / "net.pth", picture, "--out", tmp_path / "my maps")
    outcome = featviz(*arguments)
    refused(outcome, 1, r"net\.pth needs __main__\.Net, which could run any code; nothing was")
    words = outcome.err.splitlines()[1]
    assert words.endswith(
        f"featviz run {script}/net.pth {picture} --out '{tmp_path}/my maps' --trust"
    )
    done: Outcome = featviz(*arguments, "--trust")
    assert done.code == 0, done.err
    assert (tmp_path / "my maps" / picture.name / "001_conv" / "output.png").is_file()


def test_unsafe_load_is_another_name_for_trust(
    featviz: Run, script: Path, picture: Path, tmp_path: Path
) -> None:
    """The older name of the option does the same."""
    arguments = ("run", script / "net.pth", picture, "--out", tmp_path / "maps", "--unsafe-load")
    assert featviz(*arguments).code == 0


def test_a_file_of_code_gets_the_command_with_its_class(
    featviz: Run, script: Path, picture: Path, tmp_path: Path
) -> None:
    """`run net.py img` shows `featviz run net.py:Net img`; a `--` and --arch=FILE are kept."""
    code = script / "user_train.py"
    refused(outcome := featviz("run", code, picture), 2, r"MODEL '.*user_train\.py' is code")
    assert outcome.err.rstrip().endswith(f": featviz run {code}:Net {picture}")
    outcome = featviz("run", f"--arch={code}", "--", script / "net.pth", picture)
    assert outcome.err.rstrip().endswith(
        f": featviz run --arch={code}:Net -- {script}/net.pth {picture}"
    )
