"""Libraries are imported without what lies in the current folder, which may be somebody
else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DIGITS, DIGITS_MODEL, ROOT

from featviz.errors import UsageError
from featviz.models.requirements import check_current_folder, import_library

READ_AT_THE_START = (
    ".numba_config.yaml",
    "matplotlibrc",
    "_classes.py",
    "_ops.py",
    "libcuda.so.1",
    "glibc-hwcaps/x86-64-v2/libcuda.so.1",
    "glibc-hwcaps/x86-64-v3/libcuda.so.1",
    "tls/libcuda.so.1",
    "tls/x86_64/libcuda.so.1",
    "tls/x86_64/x86_64/libcuda.so.1",
    "x86_64/libcuda.so.1",
    "x86_64/x86_64/libcuda.so.1",
)
"""Relative names of `strace -f -e trace=file featviz look MODEL IMAGE`, but for the
user's, with torch for CUDA 13 and matplotlib 3.11. Whoever reads a trap that stands
there fails."""


def python(
    code: str, folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run code in a folder, whose modules are not found."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True
    )


AMONG_TRAPS = """
from featviz.cli import guarded
from featviz.drawing.loops import quantise
code = guarded({})
quantise.recompile()  # whoever compiles reads settings, too
exit(code)
"""


@pytest.mark.slow
def test_no_file_of_the_current_folder_is_read(tmp_path: Path) -> None:
    """A command that imports torch, numba and matplotlib runs among traps as it does
    elsewhere."""
    for name in READ_AT_THE_START:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"\xff\xfe: [")
    arguments = ["look", str(DIGITS_MODEL), str(DIGITS / "00-5.png"), "--out", "a.png"]
    done = python(AMONG_TRAPS.format(arguments), tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.png").is_file()


def test_the_current_folder_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the import fails; a module of that folder is not found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    (tmp_path / "a_module_of_nobody.py").touch()
    with pytest.raises(ImportError):
        import_library("a_module_of_nobody")
    assert Path.cwd() == tmp_path


def test_a_current_folder_that_was_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneMKL would end the process."""
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    (tmp_path / "folder").rmdir()
    with pytest.raises(
        UsageError, match="the current folder is not there any more"
    ) as caught:
        check_current_folder()
    assert caught.value.hint == "cd to a folder that is"


@pytest.mark.slow
def test_broken_settings_of_matplotlib_end_in_one_line(tmp_path: Path) -> None:
    """Those of the user, from Python; commands have settings of their own."""
    (tmp_path / "settings").write_bytes(b"font.size: \xff\xfe")
    code = "from featviz.models.requirements import require_matplotlib as f\ntry: f()\n"
    code += "except Exception as error: print(type(error).__name__, error)"
    done = python(code, tmp_path, MATPLOTLIBRC=str(tmp_path / "settings"))
    assert done.stdout.startswith("FeatvizError matplotlib cannot be imported: ")
