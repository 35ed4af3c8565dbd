"""The command `featviz kernels`, run on models of known kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from .drawn_kernels import NETS, Draw, Drawn


@pytest.fixture
def kernel_nets(tmp_path: Path) -> Callable[[str], str]:
    """The MODEL string of one of NETS."""
    path = tmp_path / "kernel_nets.py"
    path.write_text(NETS)
    return lambda name: f"{path}:{name}"


@pytest.fixture
def drawn(featviz: Run, tmp_path: Path, kernel_nets: Any) -> Draw:
    """Run the command on one of NETS."""
    counter = iter(range(100))

    def invoke(name: str, *arguments: object) -> Drawn:
        out = tmp_path / f"kernels{next(counter)}"
        done = featviz("kernels", kernel_nets(name), "--out", out, *arguments)
        assert done.code == 0, done.err
        return Drawn(out, done)

    return invoke
