"""`featviz kernels`: what it writes, skips and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from runs import tree
from torch import nn

from featviz.inspection.kernels import draw_kernels
from featviz.models.load import adopt
from featviz.options import InputOptions
from featviz.options.commands import KernelOptions
from featviz.rundir.schema import read_json


def test_lazy_convolutions_are_named(drawn: Any) -> None:
    """One that saw no input is skipped with the reason; the other is drawn. --json
    prints the rows of the manifest."""
    pictures = drawn("lazy", "--json")
    assert list(pictures.rows) == ["first"]
    (skip,) = pictures.manifest["skipped"]
    assert (skip["layer"], skip["kind"]) == ("later", "kernel")
    assert skip["reason"] == "its weight has no size yet: the LazyConv2d saw no input"
    assert "skipped: later (its weight has no size yet" in pictures.done.err
    document = json.loads(pictures.done.out)
    assert all(
        document[name] == pictures.manifest[name] for name in ("captures", "skipped")
    )


@pytest.mark.parametrize(
    ("net", "arguments", "message"),
    [
        ("dense", (), "the model has no convolutions"),
        (
            "only_lazy",
            (),
            "none of 1 layers has kernels to draw: 0: its weight has no size",
        ),
        (
            "colour",
            ("--layers", "ReLU"),
            "none of 1 layers has kernels to draw: act: ReLU has no",
        ),
        (
            "Called",
            ("--layers", "fn:relu"),
            "none of 1 layers has kernels to draw: fn:relu: it is a function",
        ),
        ("colour", ("--layers", "Conv5d"), "no layer matches --layers 'Conv5d'"),
    ],
)
def test_nothing_to_draw_is_a_usage_error(
    net: str,
    arguments: Any,
    message: str,
    featviz: Run,
    kernel_nets: Any,
    tmp_path: Path,
) -> None:
    """Exit 2, one line and a hint, and no folder."""
    done = featviz("kernels", kernel_nets(net), "--out", tmp_path / "out", *arguments)
    assert done.code == 2, done.err
    assert f"error: {message}" in done.err, done.err
    assert not (tmp_path / "out").exists()


def test_kernels_that_are_there_stay_without_overwrite(
    featviz: Run, kernel_nets: Any, tmp_path: Path
) -> None:
    """The second call ends in one line, and with --overwrite it draws."""
    call = "kernels", kernel_nets("colour"), "--out", tmp_path / "out"
    assert featviz(*call).code == 0
    before = tree(tmp_path / "out")
    again = featviz(*call, "--layers", "first")
    assert again.code == 1
    assert "--overwrite" in again.err
    assert tree(tmp_path / "out") == before
    assert featviz(*call, "--layers", "first", "--overwrite").code == 0


def test_run_json_says_what_ran(drawn: Any) -> None:
    """Kind, model, layers and the options that decide what is drawn; nothing of the
    machine."""
    pictures = drawn("colour", "--layers", "first", "--all-slices")
    run = read_json(pictures.out / "run.json")
    assert run["kind"] == "kernels"
    assert run["layers"] == ["first"]
    assert pictures.rows["first"]["index"] == 1
    assert pictures.rows["first"]["file"] == "001_first/kernel.png"
    assert run["options"]["all_slices"] is True
    assert run["options"]["normalize"] == "symmetric"
    assert run["model"]["name"] == "kernel_nets.py:colour"
    assert str(pictures.out) not in (pictures.out / "run.json").read_text()


def test_a_shared_convolution_is_drawn_once_under_its_first_name(
    tmp_path: Path,
) -> None:
    """Of two places from which it is called."""
    conv = nn.Conv2d(3, 3, 1)
    model = adopt(
        nn.Sequential(nn.Sequential(conv), nn.Sequential(conv)), InputOptions()
    )
    document, _ = draw_kernels(model, KernelOptions(out=tmp_path / "out"))
    assert [row["layer"] for row in document["captures"]] == ["0.0"]
