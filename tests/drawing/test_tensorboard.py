"""TensorBoard's events, read back with its own reader: tags, steps, numbers and pixels."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from itertools import product
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Run
from networks import Net
from PIL import Image
from torch import Tensor, nn
from torchvision.utils import make_grid

import featviz as fv
from featviz.drawing import tensorboard
from featviz.errors import StoreError
from featviz.options import PAD_GREY

pytest.importorskip("tensorboard")

RAW: dict[str, Any] = {
    "mean": (0.0,) * 3,
    "std": (1.0,) * 3,
    "input_channels": 3,
    "size": (16, 20),
}
NAMES = ["0.png", "1.png", "2.png"]


class Events:
    """A folder of events."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import (
            EventAccumulator,
        )

        keep = dict.fromkeys(("images", "scalars", "histograms"), 0)
        self.held = EventAccumulator(str(folder), size_guidance=keep).Reload()

    def tags(self, kind: str) -> set[str]:
        return set(self.held.Tags()[kind])

    def images(self, tag: str) -> dict[int, np.ndarray]:
        """RGB pixels by step; the size written beside an image is that of its pixels."""
        found = {}
        for event in self.held.Images(tag):
            image = Image.open(io.BytesIO(event.encoded_image_string))
            assert (event.width, event.height) == image.size
            found[event.step] = np.asarray(image.convert("RGB")).astype(int)
        return found

    def histogram(self, tag: str, step: int = 0) -> Any:
        return {
            event.step: event.histogram_value for event in self.held.Histograms(tag)
        }[step]

    def scalars(self, tag: str) -> dict[int, float]:
        return {event.step: event.value for event in self.held.Scalars(tag)}


Ran = Callable[..., Events]


@pytest.fixture
def ran(tmp_path: Path) -> Ran:
    """Run a model with a board, and read it."""

    def invoke(model: nn.Module, images: Path, layers: str, **options: Any) -> Events:
        board = {"tensorboard": tmp_path / "tb"}
        fv.run(model, images, layers, tmp_path / "out", **board, **RAW, **options)
        return Events(tmp_path / "tb" / "out")

    return invoke


@pytest.fixture
def net() -> nn.Module:
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
    (tmp_path / "in").mkdir()
    for seed, name in enumerate(NAMES):
        pixels = np.random.default_rng(seed).integers(
            0, 256, (16, 20, 3), dtype=np.uint8
        )
        Image.fromarray(pixels).save(tmp_path / "in" / name)
    return tmp_path / "in"


def outputs(net: nn.Module, path: Path) -> dict[str, Tensor]:
    """What the layers give, by plain hooks."""
    pixels = np.asarray(Image.open(path)).astype(np.float32) / 255
    tensors: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def keep(module: Any, args: Any, output: Tensor) -> None:
            tensors[f"{name}.call1" if name in tensors else name] = output.clone()

        return keep

    handles = [m.register_forward_hook(hook(n)) for n, m in net.named_modules() if n]
    with torch.no_grad():
        net(torch.from_numpy(pixels).permute(2, 0, 1)[None])
    for handle in handles:
        handle.remove()
    return tensors


def torchvisions(output: Tensor) -> np.ndarray:
    """The grid that scripts log: make_grid(normalize=True, scale_each=True)."""
    maps = output.permute(1, 0, 2, 3)
    told = {"nrow": isqrt(len(maps)), "pad_value": PAD_GREY}
    grid = make_grid(maps, normalize=True, scale_each=True, **told)
    return (
        grid.mul(255).add(0.5).clamp(0, 255).byte().permute(1, 2, 0).numpy().astype(int)
    )


def test_grids_are_make_grids_one_tag_a_layer(
    net: nn.Module, pictures: Path, ran: Ran
) -> None:
    """Tags by layer and call, the image's position as step, torchvision's pixels but
    for crosses on maps of zeros; and no scalars, whose lines would join images."""
    events = ran(net, pictures, "conv,relu,last")
    layers = ("conv", "relu", "relu.call1", "last")
    kernels = {"kernel/conv", "kernel/last"}
    assert events.tags("images") == {f"output/{name}" for name in layers} | kernels
    assert not events.tags("scalars")
    assert events.images("kernel/conv").keys() == {0}
    for step, name in enumerate(NAMES):
        for layer, output in outputs(net, pictures / name).items():
            shown = events.images(f"output/{layer}")
            assert sorted(shown) == [0, 1, 2]
            expected = torchvisions(output)
            assert shown[step].shape == expected.shape
            different = np.abs(shown[step] - expected).max(-1) > 1
            for channel in np.flatnonzero((output[0] == 0).flatten(1).all(1)):
                y, x = divmod(int(channel), isqrt(output.shape[1]))
                cross = different[2 + 16 * y :, 2 + 20 * x :][:14, :18]
                assert cross[0, 0]
                assert cross[0, -1]
                assert cross.mean() < 0.3
                cross[:] = False
            assert not different.any()
            value = events.histogram(f"histogram/{layer}", step)
            assert value.num == output.numel() == sum(value.bucket)
    assert (outputs(net, pictures / "0.png")["relu"][0, 3] == 0).all()


def test_training_steps_make_lines_of_each_image(
    net: nn.Module, pictures: Path, tmp_path: Path
) -> None:
    """A Watcher's steps: each image has its own tags, with its share of zeros and its
    channels that are nowhere above zero at each step."""
    expected: list[dict[str, dict[str, Tensor]]] = []
    board = tmp_path / "tb"
    options = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "size": (16, 20)}
    with fv.Watcher(
        net, pictures, "conv,relu", 1, tmp_path / "out", tensorboard=board, **options
    ) as watcher:
        for _ in range(2):
            expected.append({name: outputs(net, pictures / name) for name in NAMES})
            with torch.no_grad():
                net.conv.bias += 0.1
            watcher.step()
    events = Events(tmp_path / "tb")
    for layer, name in product(("conv", "relu", "relu.call1"), NAMES):
        zeros = events.scalars(f"zero_fraction/{layer}/{name}")
        inactive = events.scalars(f"inactive_channels/{layer}/{name}")
        assert (
            sorted(zeros)
            == [0, 1, 2]
            == sorted(events.images(f"output/{layer}/{name}"))
        )
        for step in (0, 1):
            output = expected[step][name][layer]
            assert zeros[step] == pytest.approx(
                float((output == 0).float().mean()), rel=1e-5
            )
            assert inactive[step] == int((output[0].flatten(1).amax(1) <= 0).sum())


def test_a_grid_shows_64_maps_and_says_of_how_many(pictures: Path, ran: Ran) -> None:
    """The first 64, as make_grid draws them; the histogram counts all."""
    net = nn.Sequential(nn.Conv2d(3, 70, 3)).eval()
    events = ran(net, pictures / "1.png", "Conv2d")
    output = outputs(net, pictures / "1.png")["0"]
    assert (
        np.abs(events.images("output/0")[0] - torchvisions(output[:, :64])).max() <= 1
    )
    for tag in ("output/0", "kernel/0"):
        assert events.held.SummaryMetadata(tag).summary_description == "64 of 70 maps"
    assert events.histogram("histogram/0").num == output.numel()


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0, 100], ids=["whole", "the last event is cut off"])
def test_a_resumed_run_posts_what_it_draws(
    cut: int, featviz: Run, pictures: Path, tiny_file: Path, tmp_path: Path
) -> None:
    """The pictures of one event are there, or none; kernels and images are there once."""
    base = [
        "run",
        tiny_file,
        "--layers",
        "0",
        "--size",
        "12",
        "--out",
        tmp_path / "out",
    ]
    base += ["--tensorboard", tmp_path / "tb"]
    (pictures / "2.png").rename(tmp_path / "2.png")
    assert featviz(*base, pictures).code == 0
    (path,) = (tmp_path / "tb" / "out").iterdir()
    path.write_bytes(path.read_bytes()[: path.stat().st_size - cut])
    (tmp_path / "2.png").rename(pictures / "2.png")
    for _ in range(2):
        assert featviz(*base, pictures, "--resume").code == 0
    events = Events(tmp_path / "tb" / "out")
    steps = [event.step for event in events.held.Images("output/0")]
    assert steps == ([0, 2] if cut else [0, 1, 2]) == sorted(events.images("output/0"))
    assert [e.step for e in events.held.Histograms("histogram/0")] == steps
    assert [event.step for event in events.held.Images("kernel/0")] == [0]


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
        assert np.array_equal(events.images(f"kernel/{layer}")[0], file)
    value = events.histogram("histogram-kernel/2")
    assert (value.num, value.max) == (4 * 6 * 9, float(model[2].weight.detach().max()))


@pytest.mark.parametrize(
    "values",
    [
        torch.linspace(-1, 1, 4999).sin(),
        torch.tensor([-3e38, 1.0, 3e38]),
        torch.tensor([0.0, 1e-45]),
        torch.full((9,), 3e38),
        torch.tensor([1.0, 2.0, float("nan"), float("inf"), 2.0]),
    ],
    ids=["sine", "huge", "denormal", "huge constant", "not finite"],
)
def test_histograms_are_numpys(values: Tensor) -> None:
    """numpy's counts of the finite values but for those on an edge, and sums in
    float64."""
    wide = values.double().numpy()
    wide = wide[np.isfinite(wide)]
    histogram = tensorboard.histogram(values)
    assert histogram is not None
    assert histogram["num"] == sum(histogram["bucket"]) == len(wide)
    assert (histogram["min"], histogram["max"]) == (wide.min(), wide.max())
    assert histogram["sum"] == pytest.approx(wide.sum(), rel=1e-9, abs=1e-9)
    assert histogram["sum_squares"] == pytest.approx(np.square(wide).sum(), rel=1e-9)
    limits = histogram["bucket_limit"]
    counts = np.histogram(wide, [2 * limits[0] - limits[1], *limits])[0]
    assert np.abs(np.array(histogram["bucket"]) - counts).sum() <= 4
    assert tensorboard.histogram(torch.full((3,), float("nan"))) is None


def test_without_the_package_one_line_says_how_to_get_it(
    featviz: Run,
    tmp_path: Path,
    tiny_file: Path,
    picture: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is loaded or written."""
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    for command in (["run", tiny_file, picture], ["kernels", tiny_file]):
        out = tmp_path / "out"
        done = featviz(*command, "--out", out, "--tensorboard", tmp_path / "tb")
        assert done.code == 2
        assert not out.exists()
        assert not (tmp_path / "tb").exists()
        assert "--tensorboard needs the package tensorboard" in done.err
        assert "pip install 'featviz[tensorboard]'" in done.err
        assert len(done.err.splitlines()) == 2


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A file in its place is named."""
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(StoreError, match=r"file.* cannot be written"),
        tensorboard.opened(tmp_path / "file" / "tb"),
    ):
        pass
    with tensorboard.opened(None) as board:
        assert board is None
