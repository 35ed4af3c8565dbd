"""An installation as pyproject.toml describes it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT

BUILD = (
    "import sys; from setuptools import build_meta;"
    " build_meta.build_editable(sys.argv[1])"
)
IMPORT = (
    "import site, sys; site.addsitedir(sys.argv[1]); import featviz; print(featviz.run)"
)


@pytest.mark.slow
def test_beside_the_clone_the_installed_package_is_imported(tmp_path: Path) -> None:
    """The clone's folder, also called featviz, is no namespace package without `run`."""
    pytest.importorskip("setuptools", reason="builds an editable installation")
    clone = tmp_path / "featviz"
    (clone / "featviz").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    (clone / "featviz" / "__init__.py").write_text("run = 'the function'\n")
    subprocess.run([sys.executable, "-c", BUILD, tmp_path], cwd=clone, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)

    # -E and -S leave out what is installed for this interpreter, a featviz among it
    command = [sys.executable, "-E", "-S", "-c", IMPORT, site]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert done.stdout == "the function\n", done.stderr
