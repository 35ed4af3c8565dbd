"""Exemplars against a brute-force search over stored tensors."""

from __future__ import annotations

import copy
import json
from functools import partial
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

from .conftest import SIZE, draw, whole_numbers

pytestmark = pytest.mark.medium


PLAIN = InputOptions(size=SIZE, mean=(0.0,) * 3, std=(1.0,) * 3)
Row = dict[str, Any]
"""Of exemplars.json."""
Rows = list[Row]
OPTIONS = ExemplarOptions(inputs=PLAIN, layers="Conv2d,ReLU,Linear")


OUT = Path("out")
"""In the test's own folder."""


def search(net: nn.Module, images: Path, out: Path = OUT, **choice: Any) -> Row:
    """exemplars.json of a network."""
    options = replace(OPTIONS, out=out, **choice)
    find_exemplars(adopt(net.eval(), options.inputs), [str(images)], options)
    return json.loads((out / "exemplars.json").read_text())


def column(rows: Rows, name: str) -> list[Any]:
    """A value of each row."""
    return [row[name] for row in rows]


def channels_of(layers: Rows) -> Rows:
    """The channels of all layers."""
    return [channel for layer in layers for channel in layer["channels"]]


def shown(channel: Row) -> list[tuple[object, ...]]:
    """The exemplars of a channel, without folder and number of their images."""
    return [
        (
            Path(row["image"]).name,
            round(row["value"], 5),
            row["map"],
            row["place"],
            row["box"],
        )
        for row in channel["exemplars"]
    ]


def pictures(folder: Path) -> list[Path]:
    """The images of a folder, as they are counted."""
    return sorted(folder.rglob("*.png"))


def pixels_of(image: Image.Image) -> Tensor:
    """[3, H, W], from 0 to 1."""
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1) / 255


Outputs = dict[tuple[str, int], Tensor]
"""By the layer and its call: [C, H, W], or [C]."""


def outputs_of(net: nn.Module, image: Path) -> Outputs:
    """Every output of every call of every module, before anything overwrites it."""
    outputs: Outputs = {}

    def keep(name: str, module: nn.Module, args: object, output: Tensor) -> None:
        call = sum(layer == name for layer, _ in outputs)
        outputs[name, call] = output[0]

    twin = copy.deepcopy(net)
    twin.relu.inplace = False
    for name, module in twin.named_modules():
        module.register_forward_hook(partial(keep, name))
    with torch.no_grad():
        twin(pixels_of(Image.open(image))[None])
    return outputs


class Exemplar(NamedTuple):
    """An image that excites a channel."""

    number: int
    """Of the image."""
    value: float
    place: list[int] | None
    """Of the largest value in its map [H, W]; None for a mean or a single number."""


def exemplar(number: int, plane: np.ndarray, by: str) -> Exemplar:
    """What a channel makes of an image."""
    if by == "mean" or plane.ndim == 0:
        return Exemplar(number, float(plane.mean()), None)
    place = np.unravel_index(plane.argmax(), plane.shape)
    return Exemplar(number, float(plane.max()), [int(index) for index in place])


def recorded(channel: Row) -> list[Exemplar]:
    """The exemplars of a channel in exemplars.json."""
    return [
        Exemplar(row["number"], pytest.approx(row["value"], rel=1e-6), row["place"])
        for row in channel["exemplars"]
    ]


def best(maps: list[Tensor], channel: int, by: str) -> list[Exemplar]:
    """The five images that a search over all tensors finds, earlier ones first where
    they tie; none of a channel that is zero in all of them."""
    if not any(tensor[channel].any() for tensor in maps):
        return []
    rows = [
        exemplar(number, tensor[channel].numpy(), by)
        for number, tensor in enumerate(maps)
    ]
    return sorted(rows, key=lambda row: (-row.value, row.number))[:5]


@pytest.mark.parametrize("by", ["max", pytest.param("mean", marks=pytest.mark.slow)])
def test_a_search_over_all_tensors_finds_the_same(
    by: str, net: nn.Module, noise: Path
) -> None:
    """Images, values and places of every channel of every call, ties included."""
    outputs = [outputs_of(net, image) for image in pictures(noise)]

    layers = search(net, noise, top=5, rank_by=by)["layers"]

    calls = [(row["layer"], row["call"]) for row in layers]
    assert calls == [("conv1", 0), ("relu", 0), ("conv2", 0), ("relu", 1), ("head", 0)]
    for row in layers:
        maps = [by_call[row["layer"], row["call"]] for by_call in outputs]
        for channel in row["channels"]:
            assert recorded(channel) == best(maps, channel["channel"], by)


def test_images_of_many_sizes_give_what_each_gives_alone(net: nn.Module) -> None:
    """More sizes than are remembered, each met twice; boxes lie in the file's pixels."""
    sizes = [(14 + number, 30 - number) for number in range(11)] * 2
    for number, size in enumerate(sizes):
        pixels = np.random.default_rng(number).integers(0, 2, (*size, 3)) * 255
        draw(Path(f"sizes/{number:02d}.png"), pixels)
    outputs = [outputs_of(net, image) for image in pictures(Path("sizes"))]

    choice = {"inputs": InputOptions(preset="none"), "layers": "conv1", "top": 5}
    (row,) = search(net, Path("sizes"), **choice)["layers"]

    maps = [by_call["conv1", 0] for by_call in outputs]
    boxes_checked = 0
    for channel in row["channels"]:
        assert recorded(channel) == best(maps, channel["channel"], "max")
        for best_image in channel["exemplars"]:
            y, x = best_image["place"]
            height, width = sizes[best_image["number"]]
            if 1 <= x < width - 1 and 1 <= y < height - 1:
                assert best_image["box"] == [x - 1, y - 1, x + 2, y + 2]
                boxes_checked += 1
    assert boxes_checked > 3


@pytest.fixture(scope="module")
def searched(noise: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The layers of a search over the noise."""
    out = tmp_path_factory.mktemp("search") / "out"
    return search(whole_numbers(), noise, out, top=3)["layers"]


def test_the_pixels_of_a_box_give_the_value(
    searched: Rows, net: nn.Module, noise: Path
) -> None:
    """Those that lie inside the image, run alone through the convolution."""
    conv = searched[0]
    assert conv["receptive_field"] == {"how": "computed", "size": [3, 3]}
    checked = 0
    for channel in conv["channels"]:
        weight = net.conv1.weight[channel["channel"]]
        for exemplar in channel["exemplars"]:
            image = Image.open(noise / exemplar["image"])
            pixels = pixels_of(image.crop(exemplar["box"]))
            if pixels.shape == weight.shape:
                value = (pixels * weight).sum().item()
                assert value == pytest.approx(exemplar["value"])
                checked += 1
    assert checked > 3


@pytest.mark.parametrize("by", ["max", "mean"])
def test_a_channel_that_is_zero_in_all_images_has_no_exemplars(
    by: str, noise: Path
) -> None:
    """Nor a picture; one whose best images alone are zero has both."""

    def planes(self: Any, x: Tensor) -> Tensor:
        is_first = (x[:, 0, :2] == first[0, :2]).all(dim=(1, 2))[:, None, None]
        x[:, 0] = 0
        x[:, 1] = torch.where(is_first, -1.0, 0.0)
        x[:, 2] = 0.5
        return self.last(x)

    first = pixels_of(Image.open(pictures(noise)[0]))
    net = Net(planes, last=nn.Identity())
    found = search(net, noise, layers="last", top=3, rank_by=by)["layers"]
    zero, below, equal = channels_of(found)
    assert (zero["exemplars"], zero["file"]) == ([], None)
    assert column(below["exemplars"], "value") == [0, 0, 0]
    assert column(equal["exemplars"], "value") == [0.5, 0.5, 0.5]
    assert (Path("out") / below["file"]).exists()


def test_exemplars_have_the_names_of_their_images(searched: Rows, noise: Path) -> None:
    """With the folder, and the size of the map."""
    names = [path.relative_to(noise).as_posix() for path in pictures(noise)]
    for channel in channels_of(searched[:1]):
        for exemplar in channel["exemplars"]:
            assert exemplar["image"] == names[exemplar["number"]]
            assert exemplar["map"] == list(SIZE)


def test_the_mean_of_a_map_is_that_of_its_finite_values(noise: Path) -> None:
    """numpy's, of as many values as each map of each image has; not a channel of
    none."""

    def way(self: Any, x: Tensor) -> Tensor:
        x[:, 0, :3, :2] = torch.nan
        x[:, 1] = torch.nan
        x[:, 2][x[:, 2] > 0.6] = torch.inf
        return self.last(x)

    net = Net(way, last=nn.Identity())
    found = search(net, noise, layers="last", top=20, rank_by="mean")["layers"]
    images = [np.asarray(Image.open(path)) / 255 for path in pictures(noise)]
    holes, empty, bright = channels_of(found)
    expected = sorted(
        [image[..., 0] for image in images], key=lambda red: -mean_but(red)
    )
    assert column(holes["exemplars"], "value") == pytest.approx(
        [mean_but(red) for red in expected], rel=1e-5
    )
    assert empty["exemplars"] == []
    blues = [image[..., 2][image[..., 2] <= 0.6].mean() for image in images]
    assert column(bright["exemplars"], "value") == pytest.approx(
        sorted(blues, reverse=True), rel=1e-5
    )


def mean_but(values: np.ndarray) -> float:
    """The mean without the upper left corner of 3 × 2."""
    rest = values.copy()
    rest[:3, :2] = np.nan
    return float(np.nanmean(rest))


def test_nan_and_infinities_excite_nothing(noise: Path) -> None:
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
    holes, empty, plain = channels_of(
        search(net, noise, layers="last", top=2)["layers"]
    )

    assert column(holes["exemplars"], "value") == [-2.0, -2.0]
    assert empty["exemplars"] == []
    assert empty["file"] is None
    assert column(plain["exemplars"], "value") == [1.0, 1.0]
    assert not (OUT / "001_last/output/c00001.png").exists()


@pytest.fixture(scope="module")
def by_class(noise: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a search for each class."""
    out = tmp_path_factory.mktemp("classes") / "out"
    search(whole_numbers(), noise, out, layers="conv1,relu", top=3, per_class=True)
    return out


def layers_of(out: Path) -> Rows:
    return json.loads((out / "exemplars.json").read_text())["layers"]


def test_each_class_has_layers_of_its_own(by_class: Path) -> None:
    """A call comes once for each folder, and each has a sheet."""
    layers = layers_of(by_class)
    assert [(row["layer"], row["call"], row["class_name"]) for row in layers] == [
        ("conv1", 0, "cat"),
        ("conv1", 0, "dog"),
        ("relu", 0, "cat"),
        ("relu", 0, "dog"),
        ("relu", 1, "cat"),
        ("relu", 1, "dog"),
    ]
    sheets = {row["sheet"] for row in layers}
    assert len(sheets) == 6
    assert all((by_class / sheet).is_file() for sheet in sheets)


@pytest.mark.parametrize("name", ["cat", "dog"])
def test_a_class_has_what_its_folder_has_alone(
    name: str, by_class: Path, net: nn.Module, noise: Path
) -> None:
    """Images, values and boxes of every channel."""
    alone = search(net, noise / name, layers="conv1,relu", top=3)["layers"]
    layers = [row for row in layers_of(by_class) if row["class_name"] == name]
    of_class = [shown(channel) for channel in channels_of(layers)]
    assert of_class == [shown(channel) for channel in channels_of(alone)]


@pytest.fixture(scope="module")
def layouts(noise: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """The same map with channels behind the batch, channels last, and as tokens with a
    class token."""

    def way(self: Any, x: Tensor) -> Tensor:
        x = self.nhwc(self.conv(x).permute(0, 2, 3, 1).contiguous())
        class_token = self.cls_token.expand(len(x), 1, 6)
        return self.tokens(torch.cat([class_token, x.flatten(1, 2)], 1))

    conv = nn.Conv2d(3, 6, 3, padding=1)
    net = Net(way, conv=conv, nhwc=nn.Identity(), tokens=nn.Identity()).eval()
    net.cls_token = nn.Parameter(torch.ones(1, 1, 6))
    out = tmp_path_factory.mktemp("layouts") / "out"
    return search(net, noise, out, layers="conv,nhwc,tokens", top=3)["layers"]


def test_any_layout_gives_the_same_places(layouts: Rows) -> None:
    """One map has the same exemplars, however its axes stand."""
    assert column(layouts[:3], "layout") == ["nchw", "nhwc", "tokens"]
    expected = layouts[0]["channels"][0]["exemplars"]
    for row in layouts[:3]:
        assert row["receptive_field"]["how"] == "computed"
        assert row["channels"][0]["exemplars"] == expected


def test_a_class_token_has_no_place(layouts: Rows) -> None:
    """Its box is the image."""
    token = layouts[3]
    assert token["key"] == "class_token"
    assert token["layout"] == "vector"
    assert token["receptive_field"]["how"] == "no place"
    exemplar = token["channels"][0]["exemplars"][0]
    assert exemplar["place"] is None
    assert exemplar["map"] is None
    assert exemplar["box"] == [0, 0, SIZE[1], SIZE[0]]


class Choosy(nn.Module):
    """Patches of 4 × 4 as tokens, and eighteen queries, which only where they come from
    tells from the patches of an image of 12 × 24; images whose corner is white are
    refused on the way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
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


REFUSED = 2
"""The number of the image that `Choosy` does not take."""


@pytest.fixture
def photos() -> Path:
    """Six pictures of two sizes; the refused one is the first of its size."""
    sizes = [(16, 16), (16, 16), (12, 24), (12, 24), (12, 24), (16, 16)]
    for number, size in enumerate(sizes):
        pixels = np.random.default_rng(number).integers(0, 250, (*size, 3))
        pixels[0, 0] = 255 if number == REFUSED else 0
        draw(Path(f"photos/{number}.png"), pixels)
    return Path("photos")


@pytest.mark.parametrize("batch", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_an_image_of_a_new_shape_may_be_refused(batch: int, photos: Path) -> None:
    """It is a failed image; the others, of its shape too, give what they give without
    it."""
    inputs = InputOptions(preset="none")
    choice = {"inputs": inputs, "layers": "Linear", "batch_size": batch}
    net = Choosy()

    content = search(net, photos, **choice)
    (photos / f"{REFUSED}.png").unlink()
    expected = search(net, photos, Path("good"), **choice)

    assert column(content["images"]["failures"], "number") == [REFUSED]
    assert content["images"]["seen"] == 5
    channels = [shown(channel) for channel in channels_of(content["layers"])]
    assert channels == [shown(channel) for channel in channels_of(expected["layers"])]
    # two channels of queries, which have no places, and two of tokens
    assert [map_sizes(channel) for channel in channels_of(content["layers"])] == [
        [None],
        [None],
        [[3, 6], [4, 4]],
        [[3, 6], [4, 4]],
    ]


def map_sizes(channel: Row) -> list[Any]:
    """The sizes of the maps of all five exemplars of a channel, each once."""
    sizes = column(channel["exemplars"], "map")
    assert len(sizes) == 5
    return sorted(size for index, size in enumerate(sizes) if size not in sizes[:index])


def test_nothing_to_look_at(noise: Path) -> None:
    """A layer that gives no channels is a usage error with its reason, and nothing is
    written."""
    net = Net(lambda self, x: self.last(torch.fft.fft(x)), last=nn.Identity())
    message = "no tensor with channels in 1 selected layer"
    with pytest.raises(UsageError, match=message):
        search(net, noise, layers="last")
    assert not OUT.exists()


def test_what_a_refused_image_gave_before_is_forgotten() -> None:
    """It excites the channel most, and is no exemplar."""

    def way(net: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = net.conv(x)  # type: ignore[operator]
        if x.max() > 0.9:
            raise ValueError("too bright")
        return output

    for number, grey in enumerate((50, 255, 100)):
        draw(Path(f"photos/{number}.png"), np.full((*SIZE, 3), grey))
    conv = nn.Conv2d(3, 1, 1)
    nn.init.ones_(conv.weight)

    content = search(Net(way, conv=conv), Path("photos"), layers="conv")

    assert column(content["images"]["failures"], "number") == [1]
    (channel,) = channels_of(content["layers"])
    assert column(channel["exemplars"], "image") == ["2.png", "0.png"]


def test_rows_that_are_as_many_as_images_need_not_be_theirs(noise: Path) -> None:
    """A table of four rows, which each image gives whole, is none of a batch of four."""
    net = Net(
        lambda self, x: self.conv(x).mean((2, 3)) + self.table(torch.eye(4)).sum(),
        conv=nn.Conv2d(3, 5, 3),
        table=nn.Linear(4, 6),
    )
    content = search(net, noise, layers="conv,table", batch_size=4, top=1)
    assert column(content["skipped"], "layer") == ["table"]
    assert column(content["skipped"], "reason") == [
        "shape [4, 6] is no batch of 4: --batch-size 1"
    ]
    alone = search(net, noise, Path("alone"), layers="table", batch_size=1, top=1)
    assert not alone["skipped"]
