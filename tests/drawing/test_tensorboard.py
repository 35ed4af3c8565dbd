"""TensorBoard's events, read back with its own reader: tags, steps, numbers and pixels."""

from __future__ import annotations

import io
import sys
from functools import partial
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import Run
from drawn_maps import drawn, noise
from networks import Net
from numpy.testing import assert_array_equal
from PIL import Image
from runs import make_photos
from torch import Tensor, nn
from torchvision.utils import make_grid

import featviz as fv
from featviz.drawing import tensorboard
from featviz.errors import StoreError
from featviz.options import PAD_GREY, DrawOptions

pytest.importorskip("tensorboard")

RAW: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "size": (16, 20)}
NAMES = ["00.png", "01.png", "02.png"]
LAYERS = ["conv", "relu", "relu.call1", "last"]


class Events:
    """A folder of events."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import (
            EventAccumulator,
        )

        every = dict.fromkeys(("images", "scalars", "histograms"), 0)
        self.read = EventAccumulator(str(folder), size_guidance=every).Reload()

    def tags(self, kind: str) -> set[str]:
        return set(self.read.Tags()[kind])

    def image_steps(self, tag: str) -> list[int]:
        return [event.step for event in self.read.Images(tag)]

    def image(self, tag: str, step: int = 0) -> np.ndarray:
        """RGB pixels; the size written with an image is that of its pixels."""
        (event,) = (event for event in self.read.Images(tag) if event.step == step)
        image = Image.open(io.BytesIO(event.encoded_image_string))
        assert image.size == (event.width, event.height)
        return np.asarray(image.convert("RGB")).astype(int)

    def histogram(self, tag: str, step: int = 0) -> Any:
        events = {event.step: event for event in self.read.Histograms(tag)}
        return events[step].histogram_value

    def scalars(self, tag: str) -> dict[int, float]:
        return {event.step: event.value for event in self.read.Scalars(tag)}


def make_net() -> nn.Module:
    """Two convolutions with a ReLU that is called twice; channel 3 is never above zero."""

    def twice(self: nn.Module, x: Tensor) -> Tensor:
        return self.relu(self.last(self.relu(self.conv(x))))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Net(twice, conv=nn.Conv2d(3, 7, 3), relu=nn.ReLU(), last=nn.Conv2d(7, 5, 1))
    with torch.no_grad():
        model.conv.bias[3] = -9
    return model.eval()


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return make_photos(tmp_path / "in", 3, size=(20, 16))


def outputs(net: nn.Module, path: Path) -> dict[str, Tensor]:
    """What the layers give, by plain hooks."""
    pixels = np.asarray(Image.open(path)).astype(np.float32) / 255
    tensors: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        tensors[f"{name}.call1" if name in tensors else name] = output.clone()

    handles = [
        module.register_forward_hook(partial(keep, name))
        for name, module in net.named_modules()
        if name
    ]
    with torch.no_grad():
        net(torch.from_numpy(pixels).permute(2, 0, 1)[None])
    for handle in handles:
        handle.remove()
    return tensors


def torchvisions(output: Tensor) -> np.ndarray:
    """The grid that scripts log: make_grid(normalize=True, scale_each=True)."""
    grid = make_grid(
        output.permute(1, 0, 2, 3),
        nrow=isqrt(output.shape[1]),
        normalize=True,
        scale_each=True,
        pad_value=PAD_GREY,
    )
    levels = grid.mul(255).add(0.5).clamp(0, 255).byte()
    return levels.permute(1, 2, 0).numpy().astype(int)


class Board(NamedTuple):
    """A run of the network on three pictures, and what it posted."""

    net: nn.Module
    pictures: Path
    events: Events


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Board:
    folder = tmp_path_factory.mktemp("board")
    pictures = make_photos(folder / "in", 3, size=(20, 16))
    net = make_net()
    assert not outputs(net, pictures / NAMES[0])["relu"][0, 3].any()
    fv.run(
        net,
        pictures,
        "conv,relu,last",
        folder / "out",
        tensorboard=folder / "tb",
        **RAW,
    )
    return Board(net, pictures, Events(folder / "tb" / "out"))


@pytest.mark.medium
def test_there_is_one_tag_a_layer(board: Board) -> None:
    """By layer and call; there are no scalars, whose lines would join images."""
    grids = {f"output/{layer}" for layer in LAYERS}
    assert board.events.tags("images") == grids | {"kernel/conv", "kernel/last"}
    assert not board.events.tags("scalars")
    assert board.events.image_steps("kernel/conv") == [0]
    metadata = board.events.read.SummaryMetadata("output/conv")
    assert not metadata.summary_description, "all maps are shown"


every_layer = pytest.mark.parametrize("layer", LAYERS)
every_picture = pytest.mark.parametrize(("step", "name"), list(enumerate(NAMES)))


@every_layer
@every_picture
def test_grids_are_make_grids(layer: str, step: int, name: str, board: Board) -> None:
    """The image's position is the step; pixels are torchvision's but for crosses on
    maps of zeros."""
    assert board.events.image_steps(f"output/{layer}") == [0, 1, 2]
    output = outputs(board.net, board.pictures / name)[layer]
    expected = torchvisions(output)
    grid = board.events.image(f"output/{layer}", step)
    assert grid.shape == expected.shape
    differs = np.abs(grid - expected).max(-1) > 1
    is_zero = (output[0] == 0).flatten(1).all(1)
    for channel in np.flatnonzero(is_zero):
        row, column = divmod(int(channel), isqrt(output.shape[1]))
        y = 2 + 16 * row
        x = 2 + 20 * column
        cross = differs[y : y + 14, x : x + 18]
        assert cross[0, [0, -1]].all()
        assert cross.mean() < 0.3
        cross[:] = False
    assert not differs.any()


@every_layer
@every_picture
def test_histograms_count_all_values(
    layer: str,
    step: int,
    name: str,
    board: Board,
) -> None:
    """The histogram of a layer and image counts every value."""
    output = outputs(board.net, board.pictures / name)[layer]
    value = board.events.histogram(f"histogram/{layer}", step)
    assert value.num == sum(value.bucket) == output.numel()


class Training(NamedTuple):
    """Two steps of a training that was watched."""

    expected: list[dict[str, dict[str, Tensor]]]
    """At each step the outputs by picture and layer."""
    events: Events


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    folder = tmp_path_factory.mktemp("training")
    pictures = make_photos(folder / "in", 3, size=(20, 16))
    net = make_net()
    expected = []
    with fv.Watcher(
        net,
        pictures,
        "conv,relu",
        1,
        folder / "out",
        tensorboard=folder / "tb",
        **RAW,
    ) as watcher:
        for _ in range(2):
            expected.append({name: outputs(net, pictures / name) for name in NAMES})
            with torch.no_grad():
                net.conv.bias += 0.1
            watcher.step()
    return Training(expected, Events(folder / "tb"))


@pytest.mark.parametrize("layer", LAYERS[:3])
@pytest.mark.parametrize("name", NAMES)
def test_training_steps_make_lines_of_each_image(
    layer: str,
    name: str,
    training: Training,
) -> None:
    """A Watcher's steps: each image has its own tags, with its share of zeros and its
    channels that are nowhere above zero at each step."""
    zeros = training.events.scalars(f"zero_fraction/{layer}/{name}")
    inactive = training.events.scalars(f"inactive_channels/{layer}/{name}")
    assert training.events.image_steps(f"output/{layer}/{name}") == [0, 1, 2]
    assert list(zeros) == [0, 1, 2]
    for step, outputs_of in enumerate(training.expected):
        maps = outputs_of[name][layer][0].flatten(1)
        share = float((maps == 0).float().mean())
        assert zeros[step] == pytest.approx(share, rel=1e-5)
        assert inactive[step] == int((maps.amax(1) <= 0).sum())


@pytest.mark.medium
def test_a_grid_shows_64_maps_and_says_of_how_many(
    pictures: Path,
    tmp_path: Path,
) -> None:
    """The first 64, as make_grid draws them; the histogram counts all."""
    net = nn.Sequential(nn.Conv2d(3, 70, 3)).eval()
    path = pictures / NAMES[0]
    fv.run(net, path, "0", tmp_path / "out", tensorboard=tmp_path / "tb", **RAW)
    events = Events(tmp_path / "tb" / "out")
    output = outputs(net, path)["0"]
    expected = torchvisions(output[:, :64])
    assert np.abs(events.image("output/0") - expected).max() <= 1
    for tag in ("output/0", "kernel/0"):
        assert events.read.SummaryMetadata(tag).summary_description == "64 of 70 maps"
    assert events.histogram("histogram/0").num == output.numel()


@pytest.mark.parametrize(
    ("channels", "shown", "columns"), [(9, 9, 12), (40, 16, 16), (1, 1, 4)]
)
def test_slices_of_a_clip_stay_in_one_row(
    channels: int, shown: int, columns: int
) -> None:
    """Of four slices each, and 64 tiles are shown at most."""
    picture = drawn(noise(1, channels, 4, 5, 6))
    grid = tensorboard.as_make_grid(picture, DrawOptions())
    assert list(grid.drawn) == list(range(shown))
    assert grid.plan.tile_count == len(grid.tiles) == 4 * shown
    assert grid.plan.columns == columns


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "steps"),
    [
        pytest.param(0, [0, 1, 2], id="whole"),
        pytest.param(100, [0, 2], id="the last event is cut off"),
    ],
)
def test_a_resumed_run_posts_what_it_draws(
    cut: int,
    steps: list[int],
    featviz: Run,
    pictures: Path,
    tiny_file: Path,
    tmp_path: Path,
) -> None:
    """The pictures of one event are there, or none; kernels and images are there once."""
    base = ["run", tiny_file, pictures, "--layers", "0", "--size", "12"]
    base += ["--out", tmp_path / "out", "--tensorboard", tmp_path / "tb"]
    (pictures / NAMES[2]).rename(tmp_path / NAMES[2])
    assert featviz(*base).code == 0
    (path,) = (tmp_path / "tb" / "out").iterdir()
    path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])
    (tmp_path / NAMES[2]).rename(pictures / NAMES[2])
    for _ in range(2):
        assert featviz(*base, "--resume").code == 0
    events = Events(tmp_path / "tb" / "out")
    assert events.image_steps("output/0") == steps
    assert [event.step for event in events.read.Histograms("histogram/0")] == steps
    assert events.image_steps("kernel/0") == [0]


@pytest.mark.medium
def test_the_first_of_several_shards_posts_the_kernels(
    featviz: Run, pictures: Path, tiny_file: Path, tmp_path: Path
) -> None:
    """They are the same for all."""
    base = ["run", tiny_file, pictures, "--layers", "0", "--size", "12"]
    base += ["--out", tmp_path / "out", "--tensorboard", tmp_path / "tb"]
    for shard in ("2/2", "1/2"):
        assert featviz(*base, "--shard", shard).code == 0
    events = Events(tmp_path / "tb" / "out")
    assert events.image_steps("kernel/0") == [0]


class Tokens(nn.Module):
    """Sixteen tokens behind one of its own."""

    def forward(self, x: Tensor) -> Tensor:
        patches = x.flatten(2).transpose(1, 2)
        return torch.cat([patches[:, :1], patches], dim=1)


@pytest.mark.medium
def test_a_tensor_has_one_histogram(tmp_path: Path) -> None:
    """A token beside the grid has a picture of its own; its values are in that of the
    whole."""
    out = tmp_path / "out"
    options = {"tensorboard": tmp_path / "tb", "tensor_layout": "tokens:4x4+1"}
    image = torch.rand(3, 4, 4)
    fv.run(nn.Sequential(Tokens()), image, "Tokens", out, size=4, **options)
    events = Events(tmp_path / "tb" / "out")
    assert len(events.tags("images") - {"input"}) == 2
    assert len(events.tags("histograms")) == 1


@pytest.mark.medium
def test_kernels_go_to_a_board(featviz: Run, tmp_path: Path) -> None:
    """`featviz kernels --tensorboard`: the file's picture, and a histogram of the
    weights."""
    model = nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.Conv2d(6, 4, 3))
    torch.save(model, tmp_path / "net.pth")
    command = ("kernels", tmp_path / "net.pth", "--out", tmp_path / "out")
    assert featviz(*command, "--tensorboard", tmp_path / "tb").code == 0
    events = Events(tmp_path / "tb" / "out")
    assert events.tags("images") == {"kernel/0", "kernel/2"}
    assert not events.tags("scalars")
    for layer, folder in (("0", "001_0"), ("2", "003_2")):
        file = Image.open(tmp_path / "out" / folder / "kernel.png").convert("RGB")
        assert_array_equal(events.image(f"kernel/{layer}"), file)
    value = events.histogram("histogram-kernel/2")
    assert value.num == 4 * 6 * 9
    assert value.max == float(model[2].weight.detach().max())


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(torch.linspace(-1, 1, 4999).sin(), id="sine"),
        pytest.param(torch.tensor([-3e38, 1.0, 3e38]), id="huge"),
        pytest.param(torch.tensor([0.0, 1e-45]), id="denormal"),
        pytest.param(torch.full((9,), 3e38), id="huge constant"),
        pytest.param(torch.tensor([1.0, 2, torch.nan, torch.inf, 2]), id="not finite"),
    ],
)
def test_histograms_are_numpys(values: Tensor) -> None:
    """numpy's counts of the finite values but for those on an edge, and sums in
    float64."""
    histogram = tensorboard.histogram(values)
    assert histogram is not None
    finite = values[values.isfinite()].double().numpy()
    limits = histogram.pop("bucket_limit")
    buckets = np.array(histogram.pop("bucket"))
    assert histogram == {
        "num": len(finite),
        "min": finite.min(),
        "max": finite.max(),
        "sum": pytest.approx(finite.sum(), rel=1e-9, abs=1e-9),
        "sum_squares": pytest.approx(np.square(finite).sum(), rel=1e-9),
    }
    counts, _ = np.histogram(finite, [2 * limits[0] - limits[1], *limits])
    assert buckets.sum() == len(finite)
    assert np.abs(buckets - counts).sum() <= 4


def test_a_part_of_a_tensor_has_no_histogram(pictures: Path, tmp_path: Path) -> None:
    """The saliency of an image is one of all channels, whose values are counted."""
    options: dict[str, Any] = {"capture": "grad-input", "target": "sum", **RAW}
    board = tmp_path / "tb"
    image = pictures / NAMES[0]
    fv.run(make_net(), image, "conv", tmp_path / "out", tensorboard=board, **options)
    events = Events(board / "out")
    assert "grad-input/conv.saliency" in events.tags("images")
    assert events.tags("histograms") == {
        "histogram-grad-input/conv",
        "histogram-kernel/conv",
    }


def test_there_is_no_histogram_of_no_finite_value() -> None:
    """A tensor of NaN alone has no histogram."""
    assert tensorboard.histogram(torch.full((3,), torch.nan)) is None


@pytest.mark.parametrize(
    "command",
    [
        ["run", "tiny.pth", "picture.png"],
        ["kernels", "tiny.pth"],
    ],
)
@pytest.mark.usefixtures("tiny_file", "picture")
def test_without_the_package_one_line_says_how_to_get_it(
    command: list[str],
    featviz: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A missing package ends the command before anything is loaded or written."""
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    done = featviz(*command, "--out", "out", "--tensorboard", "tb")
    assert done.code == 2
    assert not Path("out").exists()
    assert not Path("tb").exists()
    message, hint = done.err.splitlines()
    assert "--tensorboard needs the package tensorboard" in message
    assert "pip install 'featviz[tensorboard]'" in hint


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """An error names the file that stands in the folder's place."""
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(StoreError, match=r"file.* cannot be written"),
        tensorboard.open_board(tmp_path / "file" / "tb"),
    ):
        pass


def test_no_folder_is_no_board() -> None:
    """Without a folder nothing is posted."""
    with tensorboard.open_board(None) as board:
        assert board is None
