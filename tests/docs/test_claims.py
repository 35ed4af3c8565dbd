"""What the README claims about other tools and about speed is what a test or a table
says."""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

import pytest
import torch
from documents import read
from torch import Tensor, nn
from torchvision import models
from torchvision.models.feature_extraction import create_feature_extractor

import featviz


class Output(NamedTuple):
    """What a layer returned, as hooks see it."""

    kept: Tensor
    """The tensor itself, which later layers may change."""
    copied: Tensor
    """Its copy, made at once."""


def outputs_of_norms(model: nn.Module, image: Tensor) -> dict[str, Output]:
    """The output of each BatchNorm layer, by its name."""
    outputs: dict[str, Output] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            keep = partial(keep_output, outputs, name)
            handles.append(module.register_forward_hook(keep))
    model(image)
    for handle in handles:
        handle.remove()
    return outputs


def keep_output(
    outputs: dict[str, Output],
    name: str,
    module: nn.Module,
    inputs: object,
    output: Tensor,
) -> None:
    """The hook of a script that keeps outputs for later."""
    outputs[name] = Output(output, output.clone())


@pytest.mark.slow
def test_a_hook_that_keeps_outputs_shows_wrong_maps() -> None:
    """Of a ResNet-50, 49 of 53 BatchNorm layers; featviz.capture shows none of them
    wrong."""
    torch.manual_seed(0)
    model = models.resnet50().eval()
    image = torch.rand(1, 3, 64, 64)

    with torch.inference_mode():
        outputs = outputs_of_norms(model, image)
        with featviz.capture(model, "BatchNorm2d") as captured:
            model(image)

    wrong = [
        output
        for output in outputs.values()
        if not torch.equal(output.kept, output.copied)
    ]
    assert f"[{len(wrong)} of the {len(outputs)}]" in read("README")
    for name, output in outputs.items():
        assert torch.equal(captured[name][0], output.copied), name


def test_the_comparison_counts_wrong_outputs() -> None:
    """Of a ResNet-18's 20 BatchNorm layers, 17 come out wrong of a hook that keeps
    outputs, 9 of torchvision's extractor, and none of featviz."""
    torch.manual_seed(0)
    model = models.resnet18().eval()
    image = torch.rand(1, 3, 64, 64)

    with torch.inference_mode():
        outputs = outputs_of_norms(model, image)
        extracted = create_feature_extractor(model, list(outputs))(image)
        with featviz.capture(model, "BatchNorm2d") as captured:
            model(image)

    kept = {name: output.kept for name, output in outputs.items()}
    seen = {name: calls[0] for name, calls in captured.items()}
    page = read("comparison")
    for way, tensors in (
        ("| featviz, ", seen),
        ("| torchvision's ", extracted),
        ("| a hook ", kept),
    ):
        wrong = [
            name
            for name, output in outputs.items()
            if not torch.equal(tensors[name], output.copied)
        ]
        (row,) = re.findall(rf"^{re.escape(way)}.*$", page, re.MULTILINE)
        assert row.endswith(f"| {len(wrong)} of {len(outputs)} |"), way


def table(page: str) -> dict[str, dict[str, str]]:
    """The table of tools on a page: for each want the cells of the tools."""
    (head, lines) = re.findall(
        r"^(\| you want \| .*)\n\|[-|]+\|\n((?:\|.*\n)+)", read(page), re.MULTILINE
    )[0]
    tools = cells_of(head)[1:]
    rows = {}
    for line in lines.splitlines():
        want, *cells = cells_of(line)
        rows[want] = dict(zip(tools, cells, strict=True))
    return rows


def cells_of(line: str) -> list[str]:
    """The cells of a row, without their links."""
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", line).strip("| ").split(" | ")


def test_the_short_comparison_is_a_part_of_the_long_one() -> None:
    """The README's table says of its tools what docs/comparison.md says of them."""
    whole = table("comparison")
    for want, cells in table("README").items():
        assert cells.items() <= whole[want].items(), want


def test_the_speed_of_the_comparison_is_that_of_its_table() -> None:
    """The rows of speed have the figures that the page gives for each job."""
    (measured,) = re.findall(
        r"^\| job \| featviz \| others \|\n\|[-|]+\|\n((?:\|.*\n)+)",
        read("comparison"),
        re.MULTILINE,
    )
    jobs = [cells_of(line) for line in measured.splitlines()]
    rows = [row for want, row in table("comparison").items() if "speed" in want]
    assert len(rows) == len(jobs) == 3
    for row, (_, ours, others) in zip(rows, jobs, strict=True):
        assert row.pop("featviz") == f"{ours} ms"
        for tool, time in row.items():
            assert time == "–" or f"{tool} {time.removesuffix(' ms')}" in others


def test_the_short_comparison_has_what_people_look_for() -> None:
    """Among its rows are comparing models, gates, exemplars and speed."""
    assert table("README").keys() >= {
        "speed: all channels of 37 layers as PNG files",
        "the images that excite a channel most",
        "two models or runs, layer by layer",
        "an exit code for CI",
    }


class SpeedRow(NamedTuple):
    """A row of the table in docs/speed.md, in milliseconds an image."""

    plain: int
    forward: int
    featviz: int
    ratio: int
    """Plain / featviz, as the table says."""


def speed_rows() -> list[SpeedRow]:
    """The rows of the table."""
    rows = re.findall(
        r"^\| \w+" + r" \| (\d+)" * 4 + r" \|$", read("speed"), re.MULTILINE
    )
    return [SpeedRow(*map(int, row)) for row in rows]


def test_the_readme_has_the_speed_of_the_table() -> None:
    """Its ratios, and those at the top of docs/speed.md, are the least and the greatest of
    the table there."""
    rows = speed_rows()
    assert len(rows) == 3
    forward = [row.featviz / row.forward for row in rows]
    plain = [row.ratio for row in rows]
    least, most = min(plain), max(plain)
    assert (round(min(forward), 1), round(max(forward), 1)) == (1.1, 2.6)
    assert "1.1 to 2.6 times as long as its forward pass" in read("README")
    assert f"{least} to {most} times as long" in read("speed")


def test_the_ratios_of_the_table_follow_from_its_times() -> None:
    """The plain way's time, divided by featviz's, is the rounded ratio beside them."""
    for row in speed_rows():
        assert row.plain / row.featviz == pytest.approx(row.ratio, abs=0.6)
