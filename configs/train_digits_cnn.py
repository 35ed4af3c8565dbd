"""Train the three-convolution digit network that ships as ``configs/digits_cnn.pth``.

The network is the classic first MNIST demonstration: three times convolution, ReLU and
pooling, then one linear layer. It is a single ``nn.Sequential`` of ``torch.nn`` modules
and is saved whole, so it can be loaded without this file.

By default it learns from digits drawn with the fonts that matplotlib brings along, so
nothing has to be downloaded. With ``--mnist DIR`` it learns from the real MNIST files
found in ``DIR``.

    python configs/train_digits_cnn.py
    python configs/train_digits_cnn.py --mnist data --out mnist_cnn.pth

The same command gives the same file, byte for byte, on the same versions of the
libraries."""

from __future__ import annotations

import argparse
import functools
import gzip
import io
import math
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor, nn

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]
Split = tuple[Tensor, Tensor]  # images [N, 1, 28, 28] float32 in 0..1, labels [N] int64

SIDE = 28  # pixels, as in MNIST
OVERSAMPLE = 4  # digits are drawn this many times larger, then averaged down
CANVAS = SIDE * OVERSAMPLE
GLYPH_HEIGHT = 20 * OVERSAMPLE  # MNIST digits fill a box of 20 x 20 pixels

# The bundled fonts whose digits look like digits. The others hold no digits (cmex10,
# STIXSiz*), put other symbols in their places (cmsy10, LastResort) or repeat these
# shapes.
FONT_NAMES = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-BoldOblique",
    "DejaVuSans-Oblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSansMono-Oblique",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
    "STIXGeneral",
    "STIXGeneralBol",
    "STIXGeneralBolIta",
    "STIXGeneralItalic",
    "cmb10",
    "cmr10",
    "cmss10",
    "cmti10",
    "cmtt10",
)

MNIST_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


class DataError(Exception):
    """The training data cannot be used; the message says why."""


# ---------------------------------------------------------------------------------------------
# The network


def build_model(width: int = 32) -> nn.Sequential:
    """Return the untrained network: [N, 1, 28, 28] in 0..1 to class scores [N, 10].

    ``width`` is the number of channels of the first convolution; the next two have
    twice and four times as many."""
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(2 * width, 4 * width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )
    return model.apply(_wake)


def _wake(layer: nn.Module) -> None:
    """Start a convolution so that each of its channels passes its ReLU for some inputs."""
    # With torch's own start, about one channel in ten of the last layer never fires at
    # all.
    if isinstance(layer, nn.Conv2d) and layer.bias is not None:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.constant_(layer.bias, 0.05)


def save(model: nn.Module, path: Path) -> None:
    """Save the whole model at ``path``; an older file there is replaced in one step."""
    # Saving to memory first keeps the name of the file out of it.
    buffer = io.BytesIO()
    torch.save(model.cpu().eval(), buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(buffer.getvalue())
        os.replace(beside, path)  # noqa: PTH105 - says what is meant: replace, never move
    finally:
        beside.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------
# Digits drawn from fonts


@functools.cache
def font_paths() -> tuple[Path, ...]:
    """Return the usable font files that matplotlib brings along."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    paths = tuple(p for name in FONT_NAMES if (p := folder / f"{name}.ttf").is_file())
    if not paths:
        raise DataError(f"none of matplotlib's fonts is in {folder}")
    return paths


@functools.cache
def glyph(font: Path, digit: int) -> Image.Image:
    """Draw one digit in the middle of a square of ``CANVAS`` pixels, 80 of them high
    (mode L)."""
    text = str(digit)
    # The basic layout is there in every build of Pillow, so the result does not depend
    # on it.
    layout = ImageFont.Layout.BASIC
    probe = ImageFont.truetype(font, 100, layout_engine=layout).getbbox(text)
    size = round(100 * GLYPH_HEIGHT / (probe[3] - probe[1]))
    face = ImageFont.truetype(font, size, layout_engine=layout)
    left, top, right, bottom = face.getbbox(text)
    corner = ((CANVAS - left - right) / 2, (CANVAS - top - bottom) / 2)
    image = Image.new("L", (CANVAS, CANVAS), 0)
    ImageDraw.Draw(image).text(corner, text, fill=255, font=face)
    return image


def _affine(rng: np.random.Generator) -> tuple[float, ...]:
    """Return a random turn, slant, scale and shift as the six numbers Pillow wants."""
    angle = math.radians(rng.uniform(-14, 14))
    slant = rng.uniform(-0.2, 0.2)
    wide, high = rng.uniform(0.78, 1.12, 2)
    turn = np.array(
        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    )
    matrix = np.linalg.inv(turn @ np.array([[wide, slant], [0.0, high]]))
    centre = np.full(2, (CANVAS - 1) / 2)
    offset = centre - matrix @ (centre + rng.uniform(-2.5, 2.5, 2) * OVERSAMPLE)
    a, b, d, e = (float(v) for v in matrix.flat)
    return a, b, float(offset[0]), d, e, float(offset[1])


def _restroke(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Make the strokes thicker or thinner, and their edges harder or softer, by a
    little."""
    blurred = image.filter(ImageFilter.GaussianBlur(rng.uniform(1.5, 3.5)))
    # a low level of the blurred edge lies further out
    level = rng.uniform(0.25, 0.48) * 255
    gain = rng.uniform(1.6, 4.0)
    return blurred.point(
        [round(min(255, max(0, 127 + gain * (v - level)))) for v in range(256)]
    )


def render_digit(digit: int, rng: np.random.Generator) -> Floats:
    """Draw one random variant of ``digit``: [28, 28], 0 (black ground) to 1 (white
    digit)."""
    fonts = font_paths()
    drawn = glyph(fonts[int(rng.integers(len(fonts)))], digit)
    moved = drawn.transform(
        drawn.size, Image.Transform.AFFINE, _affine(rng), Image.Resampling.BILINEAR
    )
    small = _restroke(moved, rng).resize((SIDE, SIDE), Image.Resampling.BOX)
    pixels = (
        np.asarray(small, dtype=np.float32) / 255 * np.float32(rng.uniform(0.8, 1.0))
    )
    noise = rng.standard_normal((SIDE, SIDE), dtype=np.float32) * np.float32(
        rng.uniform(0, 0.05)
    )
    return np.clip(pixels + noise, 0, 1)


def render_digits(count: int, rng: np.random.Generator) -> tuple[Floats, Labels]:
    """Draw random digits: images [count, 1, 28, 28] in 0..1 and labels [count] in 0..9."""
    labels = rng.integers(0, 10, count, dtype=np.int64)
    images = np.zeros((count, 1, SIDE, SIDE), dtype=np.float32)
    for index, label in enumerate(labels):
        images[index, 0] = render_digit(int(label), rng)
    return images, labels


def rendered_split(count: int, seed: int, stream: int) -> Split:
    """Draw ``count`` digits; another ``stream`` of the same seed gives independent
    ones."""
    images, labels = render_digits(count, np.random.default_rng([seed, stream]))
    return torch.from_numpy(images), torch.from_numpy(labels)


# ---------------------------------------------------------------------------------------------
# The real MNIST files


def find_idx(folder: Path, name: str) -> Path:
    """Return the file ``name`` or ``name.gz`` in ``folder`` or in its ``MNIST/raw``."""
    places = (folder, folder / "MNIST" / "raw")
    for place in places:
        for candidate in (place / name, place / f"{name}.gz"):
            if candidate.is_file():
                return candidate
    raise DataError(f"no {name} or {name}.gz in {' or '.join(map(str, places))}")


def _contents(path: Path) -> bytes:
    """Return what the file holds, unpacked if its name ends in .gz."""
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def read_idx(path: Path, dims: int) -> Bytes:
    """Read an idx file of unsigned bytes with ``dims`` dimensions, such as [N, 28, 28]."""
    data = _contents(path)
    start = 4 + 4 * dims
    # Two zero bytes, 8 for "unsigned byte", the number of dimensions, then each as
    # big-endian.
    if len(data) < start or data[:4] != bytes([0, 0, 8, dims]):
        raise DataError(f"{path} is not an idx file of bytes with {dims} dimension(s)")
    shape = tuple(int(n) for n in np.frombuffer(data[4:start], dtype=">u4"))
    if len(data) - start != math.prod(shape):
        held = len(data) - start
        raise DataError(
            f"{path} should hold {math.prod(shape)} values for {shape}, has {held}"
        )
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def load_mnist(folder: Path, part: str, limit: int | None = None) -> Split:
    """Load the ``train`` or ``test`` part of MNIST, only its first ``limit`` images if
    given."""
    image_file, label_file = (find_idx(folder, name) for name in MNIST_FILES[part])
    pixels, labels = read_idx(image_file, 3), read_idx(label_file, 1)
    if len(pixels) != len(labels) or not len(labels):
        raise DataError(
            f"{len(pixels)} images in {image_file}, {len(labels)} in {label_file}"
        )
    if pixels.shape[1:] != (SIDE, SIDE) or labels.max() > 9:
        raise DataError(f"{image_file} and {label_file} do not hold 28 x 28 digits")
    images = pixels[:limit, None].astype(np.float32) / 255
    return torch.from_numpy(images), torch.from_numpy(labels[:limit].astype(np.int64))


# ---------------------------------------------------------------------------------------------
# Training


def _batches(split: Split, size: int, generator: torch.Generator) -> Iterator[Split]:
    """Yield the split once in random order, ``size`` images at a time."""
    images, labels = split
    order = torch.randperm(len(labels), generator=generator)
    for chosen in torch.split(order, size):
        yield images[chosen], labels[chosen]


@torch.no_grad()
def accuracy(model: nn.Module, split: Split) -> float:
    """Return the share (0..1) of the images whose highest score is that of their label."""
    images, labels = split
    model.eval()
    # In parts, so that all 10000 test images of MNIST need little memory.
    chosen = [model(part).argmax(1) for part in torch.split(images, 500)]
    return (torch.cat(chosen) == labels).double().mean().item()


def train_epoch(
    model: nn.Module,
    batches: Iterator[Split],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> float:
    """Take one optimizer step per batch; return the mean loss of the batches."""
    model.train()
    losses = []
    for images, labels in batches:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def train(
    model: nn.Module,
    learn: Split,
    held_out: Split,
    epochs: int,
    batch_size: int,
    seed: int,
) -> float:
    """Train the model in place; return its accuracy (0..1) on ``held_out``."""
    steps = epochs * math.ceil(len(learn[1]) / batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    # Warming up keeps the first steps small: large ones can switch ReLU channels off
    # for good.
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-3, total_steps=steps
    )
    generator = torch.Generator().manual_seed(seed)
    score = 0.0
    for epoch in range(1, epochs + 1):
        loss = train_epoch(
            model, _batches(learn, batch_size, generator), optimizer, schedule
        )
        score = accuracy(model, held_out)
        print(
            f"epoch {epoch}/{epochs}: loss {loss:.4f}, accuracy {score:.4f}",
            file=sys.stderr,
        )
    return score


# ---------------------------------------------------------------------------------------------
# Command line


def positive(text: str) -> int:
    """Parse a whole number above zero, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return number


def not_negative(text: str) -> int:
    """Parse a whole number of zero or more, for argparse."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is below zero")
    return number


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description="Train a small digit network and save it whole."
    )
    add = parser.add_argument
    here = Path(__file__).resolve().parent
    add(
        "--out",
        type=Path,
        default=here / "digits_cnn.pth",
        help="where to save the model",
    )
    add(
        "--mnist",
        type=Path,
        metavar="DIR",
        help="learn from the MNIST idx files in DIR",
    )
    size_help = "digits to {} (default: {} drawn ones, or all of MNIST's)"
    add(
        "--train-size",
        type=positive,
        metavar="N",
        help=size_help.format("learn from", 24000),
    )
    add(
        "--test-size",
        type=positive,
        metavar="N",
        help=size_help.format("test with", 2000),
    )
    add(
        "--epochs",
        type=positive,
        default=7,
        help="passes over the data (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=positive,
        default=64,
        help="images a step (default: %(default)s)",
    )
    add(
        "--width",
        type=positive,
        default=32,
        help="channels, first layer (default: %(default)s)",
    )
    add(
        "--seed",
        type=not_negative,
        default=0,
        help="seed of all that is random (default: %(default)s)",
    )
    return parser


def load_data(options: argparse.Namespace) -> tuple[Split, Split]:
    """Return what to learn from and what to test with, as the options say."""
    if options.mnist is not None:
        learn = load_mnist(options.mnist, "train", options.train_size)
        return learn, load_mnist(options.mnist, "test", options.test_size)
    print("drawing digits", file=sys.stderr)
    learn = rendered_split(options.train_size or 24000, options.seed, stream=0)
    return learn, rendered_split(options.test_size or 2000, options.seed, stream=1)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        learn, held_out = load_data(options)
    except DataError as error:
        parser.exit(2, f"error: {error}\n")
    torch.manual_seed(options.seed)
    model = build_model(options.width)
    score = train(
        model, learn, held_out, options.epochs, options.batch_size, options.seed
    )
    save(model, options.out)
    print(f"accuracy {score:.4f} on {len(held_out[1])} held-out digits")


if __name__ == "__main__":
    # Sums depend on how the work is divided, so one thread makes the result the same
    # everywhere.
    torch.set_num_threads(1)
    main()
