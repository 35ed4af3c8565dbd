"""Train the small network that restores colour, which ships as
``configs/colour_cnn.pth``.

It sees a photograph in grey and gives it back in red, green and blue. To know that the
water is blue and the ball is wood, it has to learn what it sees, so its feature maps
mean something: that is what a demonstration of feature maps needs. It learns from the
three coloured scenes in ``sample_images/scenes`` and knows no others.

The network is a single ``nn.Sequential`` of ``torch.nn`` modules and is saved whole, in
half precision, so it can be loaded without this file.

    python configs/train_colour_cnn.py

It takes about four minutes on one core. The same command gives the same file, byte for
byte, on the same machine and versions of the libraries."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
SCENES = ("landscape.jpg", "leaf-alpha.png", "spheres.jpg")
CROP = 128  # pixels: the side of the squares that the network learns from
GREY = (0.299, 0.587, 0.114)  # Pillow's weights of red, green and blue (ITU-R 601-2)
CHROMA = 4.0  # how much a wrong colour weighs against a wrong brightness


def build_model() -> nn.Sequential:
    """Return the untrained network: grey [N, 1, H, W] in 0..1 to colours [N, 3, H, W]
    in 0..1.

    H and W are multiples of 8.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv1"] = nn.Conv2d(1, 16, 5, padding=2)
    layers["relu1"] = nn.ReLU()
    for number, (given, taken) in enumerate([(16, 24), (24, 32), (32, 48)], start=2):
        layers[f"conv{number}"] = nn.Conv2d(given, taken, 3, stride=2, padding=1)
        layers[f"relu{number}"] = nn.ReLU()
    layers["wide"] = nn.Conv2d(48, 48, 3, padding=3, dilation=3)
    layers["relu_wide"] = nn.ReLU()
    for number, (given, taken) in enumerate([(48, 32), (32, 24), (24, 16)], start=1):
        layers[f"up{number}"] = nn.Upsample(scale_factor=2, mode="bilinear")
        layers[f"deconv{number}"] = nn.Conv2d(given, taken, 3, padding=1)
        layers[f"relu_up{number}"] = nn.ReLU()
    layers["colour"] = nn.Conv2d(16, 3, 3, padding=1)
    layers["sigmoid"] = nn.Sigmoid()
    model = nn.Sequential(layers)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) and layer.bias is not None:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.constant_(layer.bias, 0.05)
    return model


def read_scene(path: Path) -> Tensor:
    """Return a scene over white as float32 [3, H, W] in 0..1."""
    with Image.open(path) as image:
        rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, "white")
    pixels = np.asarray(Image.alpha_composite(white, rgba).convert("RGB"), np.float32)
    return torch.from_numpy(pixels / 255).permute(2, 0, 1)


def grey(colours: Tensor) -> Tensor:
    """Return the brightness [N, 1, H, W] of colours [N, 3, H, W], both in 0..1."""
    weights = torch.tensor(GREY).view(1, 3, 1, 1)
    return (colours * weights).sum(1, keepdim=True)


def crop(scene: Tensor, random: np.random.Generator) -> Tensor:
    """Return a random square [3, CROP, CROP] of a scene, at 0.6 to 1.2 times its size."""
    side = round(CROP / random.uniform(0.6, 1.2))
    top = int(random.integers(scene.shape[1] - side + 1))
    left = int(random.integers(scene.shape[2] - side + 1))
    square = scene[None, :, top : top + side, left : left + side]
    square = nn.functional.interpolate(
        square, (CROP, CROP), mode="bilinear", antialias=True
    )[0]
    return square.flip(-1) if random.random() < 0.5 else square


def loss(given: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean distance in brightness, and CHROMA times that of the colours
    around it."""
    brightness, expected = grey(given), grey(wanted)
    colours = (given - brightness) - (wanted - expected)
    return (brightness - expected).abs().mean() + CHROMA * colours.abs().mean()


def train(
    model: nn.Module, scenes: list[Tensor], steps: int, batch_size: int, seed: int
) -> float:
    """Train the model in place; return its mean loss over the last hundred steps."""
    random = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=4e-3, total_steps=steps
    )
    losses: list[float] = []
    model.train()
    for step in range(1, steps + 1):
        wanted = torch.stack(
            [crop(scenes[i % len(scenes)], random) for i in range(batch_size)]
        )
        value = loss(model(grey(wanted)), wanted)
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()
        schedule.step()
        losses.append(value.item())
        if step % 100 == 0:
            print(
                f"step {step}/{steps}: loss {sum(losses[-100:]) / 100:.4f}",
                file=sys.stderr,
            )
    return sum(losses[-100:]) / min(100, len(losses))


def save(model: nn.Module, path: Path) -> None:
    """Save the whole model in half precision at ``path``; an older file is replaced in
    one step."""
    buffer = io.BytesIO()  # keeps the name of the file out of it
    torch.save(model.half().eval(), buffer)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(buffer.getvalue())
        os.replace(beside, path)  # noqa: PTH105 - says what is meant: replace, never move
    finally:
        beside.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Train a small network that restores colour."
    )
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=ROOT / "configs/colour_cnn.pth",
        help="where to save it",
    )
    add(
        "--steps",
        type=int,
        default=2400,
        help="steps of training (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=int,
        default=9,
        help="squares a step (default: %(default)s)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="seed of all that is random (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    model = build_model()
    scenes = [read_scene(ROOT / "sample_images/scenes" / name) for name in SCENES]
    final = train(model, scenes, options.steps, options.batch_size, options.seed)
    save(model, options.out)
    print(f"loss {final:.4f}")


if __name__ == "__main__":
    # Sums depend on how the work is divided, so one thread makes the result the same
    # everywhere.
    torch.set_num_threads(1)
    main()
