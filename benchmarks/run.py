"""How fast is `featviz run`? Against the bare forward pass, the plain way and the floor.

    python benchmarks/run.py [--models resnet18,resnet50,vgg16] [--rounds 5] [--images 2]

For each model, with random weights, at 224 × 224, every 4-D output of Conv2d and ReLU, in one
process and interleaved:

  a  the bare forward pass
  b  the plain way: a hook with output.clone().permute(1, 0, 2, 3), then torchvision's
     save_image(normalize=True, scale_each=True)
  c  featviz's own pipeline, all files written, --scale 1
  d  the floor: the forward pass, scaling to uint8 and deflating the same bytes, each alone, added
     up as core-seconds and divided by the cores

Medians over the rounds, in milliseconds an image; the ratios b/c, c/a and c/d; the bytes of the
pictures; and with --memory how much the process grows over 200 images after the tenth.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from isal import isal_zlib
from torch import Tensor, nn
from torchvision import models
from torchvision.utils import save_image

from featviz.drawing.png import LEVEL
from featviz.images.decode import decode
from featviz.models.load import LoadedModel, adopt
from featviz.models.preprocess import InputOptions
from featviz.pipeline import run
from featviz.pipeline.options import RunOptions
from featviz.records import DrawOptions, Sample

SCENES = Path(__file__).parent.parent / "sample_images" / "scenes"
LAYERS = "Conv2d,ReLU"
INPUTS = InputOptions(
    size=256, crop=224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), channels=3
)


def hooked_forward(module: nn.Module, tensor: Tensor, hook: Callable[..., None]) -> None:
    """One forward pass with a hook on every Conv2d and ReLU."""
    parts = [part for part in module.modules() if isinstance(part, (nn.Conv2d, nn.ReLU))]
    handles = [part.register_forward_hook(hook) for part in parts]
    module(tensor)
    for handle in handles:
        handle.remove()


def plain(module: nn.Module, tensor: Tensor, folder: Path) -> None:
    """The way of the scripts: keep clones, then let torchvision draw them."""
    kept: list[Tensor] = []

    def hook(part: nn.Module, args: object, output: Tensor) -> None:
        if output.dim() == 4:
            kept.append(output.clone().permute(1, 0, 2, 3))

    hooked_forward(module, tensor, hook)
    for index, maps in enumerate(kept):
        save_image(maps, folder / f"{index}.png", normalize=True, scale_each=True)


class Floor:
    """The work that cannot be left out, each part alone, in core-seconds."""

    def __init__(self, module: nn.Module, tensor: Tensor) -> None:
        self.module, self.tensor = module, tensor
        self.kept: list[Tensor] = []
        hooked_forward(module, tensor, self._keep)
        self.bytes = [self._scaled(maps).numpy() for maps in self.kept]

    def seconds(self) -> float:
        """Core-seconds of the three parts, divided by the cores."""
        parts = (
            lambda: self.module(self.tensor),
            lambda: [self._scaled(maps) for maps in self.kept],
            lambda: [isal_zlib.compress(data, LEVEL) for data in self.bytes],
        )
        return sum(timed(part, time.process_time) for part in parts) / cores()

    def _keep(self, part: nn.Module, args: object, output: Tensor) -> None:
        if output.dim() == 4:
            self.kept.append(output[0].clone())

    def _scaled(self, maps: Tensor) -> Tensor:
        rows = maps.flatten(1)
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        return ((rows - low) * (255 / (high - low).clamp_min(1e-5)) + 0.5).to(torch.uint8)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that the work takes."""
    start = clock()
    work()
    return clock() - start


def folder_bytes(folder: Path) -> int:
    """Bytes of the layers' pictures in a folder."""
    return sum(p.stat().st_size for p in folder.rglob("*.png") if p.name != "input.png")


def measure(name: str, files: Sequence[Path], rounds: int) -> dict[str, float]:
    """Median seconds an image of a, b, c and d, and bytes an image of b and c."""
    torch.manual_seed(0)
    module = models.get_model(name, weights=None).eval()
    model = adopt(module, INPUTS)
    tensors = [
        model.preprocess.tensor(decode(Sample(file.name, (file,))).images[0]) for file in files
    ]
    floors = [Floor(module, tensor) for tensor in tensors]
    times: dict[str, list[float]] = {key: [] for key in "abcd"}
    sizes: dict[str, float] = {}
    for turn in range(rounds + 1):  # the first only warms up
        with tempfile.TemporaryDirectory() as folder:
            now = _round(model, files, tensors, floors, Path(folder))
            sizes = {side: folder_bytes(Path(folder) / side) / len(files) for side in "bc"}
        for key in times if turn else ():
            times[key].append(now[key] / len(files))
    return {key: statistics.median(values) for key, values in times.items()} | {
        f"bytes_{side}": size for side, size in sizes.items()
    }


def _round(
    model: LoadedModel,
    files: Sequence[Path],
    tensors: Sequence[Tensor],
    floors: Sequence[Floor],
    folder: Path,
) -> dict[str, float]:
    module = model.module
    (folder / "b").mkdir()
    for index in range(len(tensors)):
        (folder / "b" / str(index)).mkdir()
    options = RunOptions(layers=LAYERS, out=folder / "c", draw=DrawOptions(scale=1), inputs=INPUTS)
    return {
        "a": timed(lambda: [module(tensor) for tensor in tensors]),
        "c": timed(lambda: run(model, [str(file) for file in files], options)),
        "b": timed(
            lambda: [plain(module, t, folder / "b" / str(i)) for i, t in enumerate(tensors)]
        ),
        "d": sum(floor.seconds() for floor in floors),
    }


def growth(name: str, file: Path, images: int = 200, after: int = 10) -> float:
    """MB by which resident memory grows over a run, from one image to the last."""
    module = models.get_model(name, weights=None).eval()
    resident: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / "in" / f"{index:03d}.jpg" for index in range(images)]
        paths[0].parent.mkdir()
        for path in paths:
            path.write_bytes(file.read_bytes())
        options = RunOptions(layers=LAYERS, out=Path(folder) / "out", inputs=INPUTS)
        run(
            adopt(module, INPUTS),
            [str(paths[0].parent)],
            options,
            lambda image, total: resident.append(_resident()),
        )
    return (max(resident[after:]) - resident[after - 1]) / 1e6


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="resnet18,resnet50,vgg16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--memory", action="store_true", help="also measure growth, 200 images")
    args = parser.parse_args()
    logging.getLogger("featviz").setLevel(logging.ERROR)
    files = sorted(SCENES.iterdir())[: args.images]
    print(f"torch {torch.__version__}, {cores()} cores, {torch.get_num_threads()} threads")
    print(
        "milliseconds an image, medians\n"
        "model        a      b     c     d    b/c   c/a   c/d  MB b  MB c"
    )
    for name in args.models.split(","):
        with torch.inference_mode():
            m = measure(name, files, args.rounds)
        ms = {key: m[key] * 1e3 for key in "abcd"}
        print(
            f"{name:9s}{ms['a']:6.0f}{ms['b']:7.0f}{ms['c']:6.0f}{ms['d']:6.0f}"
            f"{m['b'] / m['c']:7.1f}{m['c'] / m['a']:6.2f}{m['c'] / m['d']:6.2f}"
            f"{m['bytes_b'] / 1e6:6.1f}{m['bytes_c'] / 1e6:6.1f}",
            flush=True,
        )
    if args.memory:
        print(
            "growth over 200 images of resnet18, after the tenth: "
            f"{growth('resnet18', files[0]):.1f} MB"
        )


if __name__ == "__main__":
    main()
