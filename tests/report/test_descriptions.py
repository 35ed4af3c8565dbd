"""Numbers, captures and settings in the words of a page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from featviz.report import descriptions
from featviz.rundir.schema import Capture

ROW = Capture(
    layer="conv1",
    type="Conv2d",
    index=1,
    kind="output",
    call=0,
    key="",
    shape=[1, 64, 8, 8],
    layout="nchw",
    maps=64,
    file="001_conv1/output.png",
    grid={"nrow": 8, "padding": 2, "tile": [8, 8], "scale": 1},
    normalize="map",
    range=None,
    min=0.0,
    max=1.0,
    mean=0.5,
    std=0.1,
    zero_fraction=0.0,
    nonfinite=0,
)
"""All maps of a convolution."""


@pytest.mark.parametrize(
    ("describe", "fields", "expected"),
    [
        (descriptions.slice_list, {}, ""),
        (descriptions.slice_list, {"slices": [1, 1]}, ""),
        (descriptions.slice_list, {"slices": [3, 3]}, "3"),
        (descriptions.slice_list, {"slices": [1, 24], "steps": [12]}, "1 of 24: 12"),
        (descriptions.slice_list, {"slices": [2, 6]}, "2 of 6: 0–1"),
        (
            descriptions.slice_list,
            {"slices": [3, 24], "steps": [0, 6, 23]},
            "3 of 24: 0, 6, 23",
        ),
        (descriptions.shared_tiles, {}, ""),
        (
            descriptions.shared_tiles,
            {"collapsed": {"3": [3, 9, 5, 6], "8": [8, 60]}},
            "3 for 3, 5–6, 9; 8 for 8, 60",
        ),
        (descriptions.map_count, {}, "64"),
        (descriptions.map_count, {"channels": [5, 2, 7]}, "3 of 64"),
        (
            descriptions.map_count,
            {"channels": [*range(63)], "collapsed": {"3": [3, 63]}},
            "63 of 64 (--collapse)",
        ),
        (
            descriptions.map_count,
            {"reduce": "max"},
            "64, as one tile: their maximum (--reduce max)",
        ),
        (descriptions.tile_count, {}, "64 feature maps"),
        (descriptions.tile_count, {"channels": [5]}, "1 feature map"),
        (descriptions.tile_count, {"reduce": "l2"}, "L2 norm of 64 feature maps"),
        (descriptions.tensor_role, {}, ""),
        (descriptions.tensor_role, {"kind": "kernel"}, ""),
        (descriptions.tensor_role, {"kind": "input"}, "the layer’s input"),
        (
            descriptions.tensor_role,
            {"kind": "grad"},
            "the gradient at the layer’s output",
        ),
        (
            descriptions.tensor_role,
            {"kind": "grad-input", "key": "saliency", "reduce": "max-abs"},
            "largest absolute value over the channels of the gradient at the layer’s"
            " input",
        ),
    ],
)
def test_what_a_picture_shows(
    describe: Callable[[Capture], str], fields: dict[str, Any], expected: str
) -> None:
    """Maps, slices and shared tiles are counted and listed."""
    assert describe(replace(ROW, **fields)) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "auto"),
        (True, "yes"),
        (False, "no"),
        (0, "0"),
        (-1.25, "−1.25"),
        ([], "none"),
        ([1, None, [True]], "1, auto, yes"),
        ({}, "none"),
        ({"name": "resnet18", "seed": 0}, "name resnet18, seed 0"),
        ("map", "map"),
    ],
)
def test_settings_are_written_as_one_says_them(value: object, expected: str) -> None:
    """Also inside one another."""
    assert descriptions.setting(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "–"), (float("nan"), "–"), (-2.50001, "−2.5"), (0, "0"), (1e-9, "1e−09")],
)
def test_numbers_have_four_digits(value: float | None, expected: str) -> None:
    """And a true minus; nothing is a dash."""
    assert descriptions.number(value) == expected


@pytest.mark.parametrize(
    ("model", "title", "name"),
    [
        ({}, "model", "model"),
        ({"kind": "file", "file": "net.pth", "sha256": "ab"}, "net.pth", "net.pth"),
        (
            {"name": "resnet18", "seed": 0, "weights": None},
            "resnet18, seed 0",
            "resnet18",
        ),
        ({"kind": "module", "type": "Net"}, "Net", "Net"),
        (
            {"file": "net.pth", "name": "nets.py:Net", "arch": "nets.py:Net"},
            "net.pth (nets.py:Net)",
            "nets.py:Net",
        ),
    ],
)
def test_the_foot_of_a_page_names_the_model(
    model: dict[str, Any], title: str, name: str
) -> None:
    """With all that is known of it, zeros too, and versions as far as they are there."""
    record = {"model": model, "torch": "2.15.0", "device": "cpu"}
    facts = dict(descriptions.run_facts(record))
    assert descriptions.model_name(model) == name
    assert facts["Model"] == title
    assert facts["Versions"] == "torch 2.15.0"
    assert facts["Device"] == "cpu"
