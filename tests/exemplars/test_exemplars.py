"""Exemplars against a brute-force search over stored tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from networks import Net
from PIL import Image
from torch import Tensor, nn

from featviz.errors import UsageError
from featviz.exemplars.exemplars import find_exemplars
from featviz.models.load import adopt
from featviz.options import InputOptions
from featviz.options.commands import ExemplarOptions

from .conftest import SIZE, draw

PLAIN = InputOptions(size=SIZE, mean=(0.0,) * 3, std=(1.0,) * 3)
OPTIONS = ExemplarOptions(inputs=PLAIN, layers="Conv2d,ReLU,Linear")


def found(
    net: nn.Module,
    images: Path,
    out: Path,
    options: ExemplarOptions = OPTIONS,
    **choice: Any,
) -> dict[str, Any]:
    """exemplars.json of a network."""
    options = replace(options, out=out, overwrite=True, **choice)
    find_exemplars(adopt(net, PLAIN), [str(images)], options)
    content: dict[str, Any] = json.loads((out / "exemplars.json").read_text())
    return content


def stored(net: nn.Module, images: Path) -> dict[tuple[str, int], list[Tensor]]:
    """Every output of every call of every module, for each image, as [C, positions]."""
    kept: dict[tuple[str, int], list[Tensor]] = {}
    for path in sorted(images.rglob("*.png")):
        calls: dict[str, int] = {}

        def keep(name: str, calls: dict[str, int] = calls) -> Callable[..., None]:
            def hook(module: nn.Module, args: object, output: Tensor) -> None:
                call = calls[name] = calls.get(name, -1) + 1
                kept.setdefault((name, call), []).append(output[0].detach().clone())

            return hook

        handles = [
            m.register_forward_hook(keep(name)) for name, m in net.named_modules()
        ]
        pixels = np.asarray(Image.open(path).convert("RGB"))
        with torch.no_grad():
            net(torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None] / 255)
        for handle in handles:
            handle.remove()
    return kept


class FoundExemplar(NamedTuple):
    """An image that excites a channel."""

    number: int
    """Of the image."""
    value: float
    position: list[int] | None
    """Of the largest value in its map [H, W]; None for a mean or a single number."""


def best(maps: list[Tensor], channel: int, top: int, by: str) -> list[FoundExemplar]:
    """The images that a search over all tensors finds."""
    rows = []
    for number, tensor in enumerate(maps):
        plane = tensor[channel].numpy()
        if by == "mean" or plane.ndim == 0:
            rows.append((-float(plane.mean()), number, None))
        else:
            at = [int(n) for n in np.unravel_index(plane.argmax(), plane.shape)]
            rows.append((-float(plane.max()), number, at))
    return [
        FoundExemplar(number=number, value=-value, position=position)
        for value, number, position in sorted(rows, key=lambda r: r[:2])[:top]
    ]


@pytest.mark.parametrize("by", ["max", pytest.param("mean", marks=pytest.mark.slow)])
def test_a_search_over_all_tensors_finds_the_same(
    by: str, net: nn.Module, noise: Path, tmp_path: Path
) -> None:
    """Images, values and places of every channel of every call, ties included."""
    content = found(net, noise, tmp_path / "out", top=5, rank_by=by)
    kept = stored(net, noise)
    labels = [(row["layer"], row["call"]) for row in content["layers"]]
    assert labels == [("conv1", 0), ("relu", 0), ("conv2", 0), ("relu", 1), ("head", 0)]
    for row in content["layers"]:
        maps = kept[row["layer"], row["call"]]
        if row["layer"] == "conv1":  # whose output the ReLU overwrites
            net.relu.inplace = False
            maps = stored(net, noise)["conv1", 0]
        for channel in row["channels"]:
            expected = best(maps, channel["channel"], 5, by)
            recorded = [
                FoundExemplar(number=e["number"], value=e["value"], position=e["place"])
                for e in channel["exemplars"]
            ]
            assert [e.number for e in recorded] == [e.number for e in expected]
            assert [e.position for e in recorded] == [e.position for e in expected]
            values = [e.value for e in recorded]
            np.testing.assert_allclose(values, [e.value for e in expected], rtol=1e-6)


def test_boxes_and_names_are_those_of_the_image(
    net: nn.Module, noise: Path, tmp_path: Path
) -> None:
    """The pixels in the box, run alone through the convolution, give the value."""
    content = found(net, noise, tmp_path / "out", top=3)
    (conv,) = (row for row in content["layers"] if row["layer"] == "conv1")
    assert conv["receptive_field"] == {"how": "computed", "size": [3, 3]}
    names = [
        path.relative_to(noise).as_posix() for path in sorted(noise.rglob("*.png"))
    ]
    checked = 0
    for channel in conv["channels"]:
        for exemplar in channel["exemplars"]:
            left_edge, top, right, bottom = exemplar["box"]
            assert exemplar["map"] == list(SIZE)
            assert exemplar["image"] == names[exemplar["number"]]
            if (right - left_edge, bottom - top) == (3, 3):
                pixels = np.asarray(
                    Image.open(noise / exemplar["image"]).crop(
                        (left_edge, top, right, bottom)
                    )
                )
                weight = net.conv1.weight[channel["channel"]].detach()
                value = (
                    torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255 * weight
                ).sum()
                assert float(value) == pytest.approx(exemplar["value"])
                checked += 1
    assert checked > 3


def test_nan_and_infinities_excite_nothing(noise: Path, tmp_path: Path) -> None:
    """The largest finite value counts; a channel without one has no exemplars and no
    picture."""

    def way(self: Any, x: Tensor) -> Tensor:
        """The image three times: with holes where it is brightest, as NaN only, and as
        it is."""
        red = x[:, :1]
        holes = torch.where(red == red.amax(), torch.inf, red - 2)
        holes[..., 0, 0] = torch.nan
        return self.last(torch.cat([holes, red * torch.nan, red], 1))

    net = Net(way, last=nn.Identity())
    content = found(
        net, noise, tmp_path / "out", replace(OPTIONS, layers="last"), top=2
    )
    holes, nothing, plain = content["layers"][0]["channels"]
    assert [e["value"] for e in holes["exemplars"]] == [-2.0, -2.0]
    assert nothing["exemplars"] == []
    assert nothing["file"] is None
    assert [e["value"] for e in plain["exemplars"]] == [1.0, 1.0]
    assert not (tmp_path / "out" / "001_last" / "output" / "c00001.png").exists()


@pytest.mark.slow
def test_each_class_has_its_own(net: nn.Module, noise: Path, tmp_path: Path) -> None:
    """With --per-class a layer comes once for each folder, with images of that folder
    only; all together they are what one finds among that folder's images alone."""
    content = found(net, noise, tmp_path / "out", top=3, per_class=True)
    rows = [(row["layer"], row["call"], row["class_name"]) for row in content["layers"]]
    expected = [
        (layer, 0, name) for layer in ("conv1", "relu") for name in ("cat", "dog")
    ]
    assert rows[:4] == expected
    for name in ("cat", "dog"):
        alone = found(net, noise / name, tmp_path / name, top=3)
        class_rows = [row for row in content["layers"] if row["class_name"] == name]
        for row, expected in zip(class_rows, alone["layers"], strict=True):
            for channel, expected_channel in zip(
                row["channels"], expected["channels"], strict=True
            ):
                got = [
                    (e["image"].split("/")[-1], e["value"], e["box"])
                    for e in channel["exemplars"]
                ]
                assert got == [
                    (e["image"], e["value"], e["box"])
                    for e in expected_channel["exemplars"]
                ]
    sheets = {row["sheet"] for row in content["layers"]}
    assert len(sheets) == 10
    assert all((tmp_path / "out" / sheet).is_file() for sheet in sheets)


def test_any_layout_gives_the_same_places(noise: Path, tmp_path: Path) -> None:
    """Channels behind the batch, channels last and tokens: one map, the same exemplars;
    the class token has no place."""

    def way(self: Any, x: Tensor) -> Tensor:
        x = self.nhwc(self.conv(x).permute(0, 2, 3, 1).contiguous())
        return self.tokens(
            torch.cat([self.cls_token.expand(len(x), 1, 6), x.flatten(1, 2)], 1)
        )

    convolution = nn.Conv2d(3, 6, 3, padding=1)
    net = Net(way, conv=convolution, nhwc=nn.Identity(), tokens=nn.Identity())
    net.cls_token = nn.Parameter(torch.zeros(1, 1, 6))
    options = replace(OPTIONS, layers="conv,nhwc,tokens")
    content = found(net.eval(), noise, tmp_path / "out", options, top=3)
    conv, nhwc, tokens, token = content["layers"]
    assert [row["layout"] for row in content["layers"]] == [
        "nchw",
        "nhwc",
        "tokens",
        "vector",
    ]
    assert nhwc["channels"][0]["exemplars"] == conv["channels"][0]["exemplars"]
    hows = [row["receptive_field"]["how"] for row in (conv, nhwc, tokens, token)]
    assert hows == ["computed", "computed", "computed", "no place"]
    assert tokens["channels"][0]["exemplars"] == conv["channels"][0]["exemplars"]
    assert token["key"] == "class_token"
    first = token["channels"][0]["exemplars"][0]
    assert (first["place"], first["map"], first["box"]) == (
        None,
        None,
        [0, 0, SIZE[1], SIZE[0]],
    )


class Choosy(nn.Module):
    """Patches of 4 × 4 as tokens, and eighteen queries, which only where they come from
    tells from the patches of an image of 12 × 24; images whose corner is white are
    refused on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 4, 4)
        self.tokens = nn.Linear(6, 2)
        self.table = nn.Parameter(torch.randn(1, 18, 6))
        self.queries = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        if (x[..., 0, 0] > 0.99).all(1).any():
            raise ValueError("white")
        attention = (self.table @ patches.transpose(1, 2)).softmax(2)
        return self.queries(attention @ patches), self.tokens(patches)


@pytest.mark.parametrize("batch", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_an_image_of_a_new_shape_may_be_refused(batch: int, tmp_path: Path) -> None:
    """It is a failed image; the others, of its shape too, give what they give without
    it."""
    refused = 2
    sizes = [(16, 16), (16, 16), (12, 24), (12, 24), (12, 24), (16, 16)]
    for number, size in enumerate(sizes):
        pixels = np.random.default_rng(number).integers(0, 250, (*size, 3))
        pixels[0, 0] = 255 if number == refused else 0
        draw(tmp_path / "photos" / f"{number}.png", pixels)
    torch.manual_seed(0)
    inputs = InputOptions(preset="none")
    options = ExemplarOptions(inputs=inputs, layers="Linear", batch_size=batch)
    searches = [replace(options, out=tmp_path / name) for name in ("all", "good")]
    model = adopt(Choosy().eval(), inputs)
    photos = tmp_path / "photos"
    every = find_exemplars(model, [str(photos)], searches[0])
    assert [failure.number for failure in every.images.failures] == [refused]
    assert every.images.seen == 5
    (photos / f"{refused}.png").unlink()
    good = find_exemplars(model, [str(photos)], searches[1])
    shown = [
        [(e.image, round(e.value, 5), e.map, e.place, e.box) for e in channel.exemplars]
        for result in (every, good)
        for layer in result.layers
        for channel in layer.channels
    ]
    assert shown[:4] == shown[4:]
    assert [len(rows) for rows in shown] == [5] * 8
    maps = [{tuple(e[2] or ()) for e in rows} for rows in shown[:4]]
    assert maps == [{()}, {()}, {(4, 4), (3, 6)}, {(4, 4), (3, 6)}]


def test_nothing_to_look_at(noise: Path, tmp_path: Path) -> None:
    """A layer that gives no channels is a usage error with its reason, and nothing is
    written."""
    complex_numbers = Net(
        lambda self, x: self.last(torch.fft.fft(x)), last=nn.Identity()
    )
    with pytest.raises(
        UsageError, match="none of the 1 selected layers gives a tensor"
    ):
        found(complex_numbers, noise, tmp_path / "out", replace(OPTIONS, layers="last"))
    assert not (tmp_path / "out").exists()


def test_what_a_refused_image_gave_before_is_forgotten(tmp_path: Path) -> None:
    """It excites the channel most, and is no exemplar."""

    def way(net: nn.Module, x: Tensor) -> Tensor:
        seen: Tensor = net.conv(x)  # type: ignore[operator]
        if x.max() > 0.9:
            raise ValueError("too bright")
        return seen

    for number, grey in enumerate((50, 255, 100)):
        draw(tmp_path / "photos" / f"{number}.png", np.full((*SIZE, 3), grey))
    model = Net(way, conv=nn.Conv2d(3, 1, 1))
    nn.init.ones_(model.conv.weight)  # type: ignore[arg-type, union-attr]
    content = found(model, tmp_path / "photos", tmp_path / "out", layers="conv")
    assert [failure["number"] for failure in content["images"]["failures"]] == [1]
    (channel,) = content["layers"][0]["channels"]
    assert [failure["image"] for failure in channel["exemplars"]] == ["2.png", "0.png"]
