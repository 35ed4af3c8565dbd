"""`featviz kernels`: what it writes, skips and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from runs import refused, run_json, tree
from torch import nn

import featviz as fv


def test_lazy_convolutions_are_named(drawn: Any) -> None:
    """One that saw no input is skipped with the reason; the other is drawn. --json
    prints the rows of the manifest."""
    pictures = drawn("lazy", "--json")
    assert list(pictures.rows) == ["first"]
    (skip,) = pictures.manifest["skipped"]
    reason = "its weight has no size yet: the LazyConv2d saw no input"
    assert (
        skip.items() >= {"layer": "later", "kind": "kernel", "reason": reason}.items()
    )
    assert "skipped: later (its weight has no size yet" in pictures.done.err
    document = json.loads(pictures.done.out)
    assert document["captures"] == pictures.manifest["captures"]
    assert document["skipped"] == pictures.manifest["skipped"]


@pytest.mark.parametrize(
    ("net", "arguments", "message"),
    [
        ("dense", (), "the model has no convolutions"),
        (
            "only_lazy",
            (),
            "no kernels to draw in 1 layer: layer 0: its weight has no size",
        ),
        (
            "colour",
            ("--layers", "ReLU"),
            "no kernels to draw in 1 layer: act: ReLU has no",
        ),
        (
            "Called",
            ("--layers", "fn:relu"),
            "no kernels to draw in 1 layer: fn:relu: it is a function",
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
    """It exits with 2 and one line, and there is no folder."""
    done = featviz("kernels", kernel_nets(net), "--out", tmp_path / "out", *arguments)
    refused(done, 2, f"error: {message}")
    assert not (tmp_path / "out").exists()


@pytest.mark.medium
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
    """It has kind, model, layers and the options that decide what is drawn; nothing of
    the machine."""
    pictures = drawn("colour", "--layers", "first", "--all-slices")
    record = run_json(pictures.out)
    assert record["kind"] == "kernels"
    assert record["layers"] == ["first"]
    options = {"all_slices": True, "normalize": "symmetric"}
    assert record["options"].items() >= options.items()
    assert record["model"]["name"] == "kernel_nets.py:colour"
    row = pictures.rows["first"]
    assert row.items() >= {"index": 1, "file": "001_first/kernel.png"}.items()
    assert str(pictures.out) not in (pictures.out / "run.json").read_text()


def test_a_shared_convolution_is_drawn_once_under_its_first_name(
    tmp_path: Path,
) -> None:
    """It is called from two modules."""
    conv = nn.Conv2d(3, 3, 1)
    net = nn.Sequential(nn.Sequential(conv), nn.Sequential(conv))
    kernels = fv.kernels(net, out=tmp_path / "out").captures
    assert [kernel.layer for kernel in kernels] == ["0.0"]


def test_kernels_stand_in_the_order_of_the_model(tmp_path: Path) -> None:
    """Whatever their size."""
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 3))
    kernels = fv.kernels(net, out=tmp_path / "out").captures
    assert [kernel.layer for kernel in kernels] == ["0", "2"]


def test_figures_are_of_all_weights_but_those_that_are_not_finite(
    tmp_path: Path,
) -> None:
    """Also where a tile is the mean of several slices."""
    conv = nn.Conv2d(4, 2, 3)
    with torch.no_grad():
        conv.weight[0] = torch.arange(36.0).view(4, 3, 3)
        conv.weight[1] = -1
        conv.weight[0, 1:] = torch.nan
    (kernel,) = fv.kernels(nn.Sequential(conv), out=tmp_path / "out").captures
    weights = conv.weight.detach().double().numpy()
    assert kernel.row["nonfinite"] == 27
    assert kernel.row["mean"] == pytest.approx(np.nanmean(weights))
    assert kernel.row["std"] == pytest.approx(np.nanstd(weights))


def test_weights_that_change_when_they_are_read_in_training_stay(
    tmp_path: Path,
) -> None:
    """A spectral norm takes a step of its estimate with each reading."""
    norm = nn.utils.parametrizations.spectral_norm
    model = nn.Sequential(norm(nn.Conv2d(3, 4, 3))).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fv.kernels(model, out=tmp_path / "kernels")
    assert model[0].training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
