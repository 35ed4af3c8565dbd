"""Train the small vision transformer that ships as ``configs/pairs_vit.pth``.

It looks at a picture with five digits of several colours, and says which digit stands
there twice, or that none does. Colours and fonts tell nothing, so each patch has to
learn which digit it belongs to, and the class token has to compare: that is what
pictures of a transformer (similar patches, PCA colours, attention rollout) should show.

Two choices make so small a network learn within minutes. It is torchvision's
``VisionTransformer`` with a convolutional stem (Xiao et al. 2021, "Early convolutions
help transformers see better"). And in training its head reads all patches, not only
the class token (Jiang et al. 2021, "All tokens matter"). The model is saved whole, in
half precision, so it can be loaded without this file.

    python configs/train_pairs_vit.py

It takes about fifteen minutes on one core, and then finds 87 of 100 pairs. The same
command gives the same file, byte for byte, on the same machine and versions of the
libraries."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import ConvStemConfig, VisionTransformer
from train_colour_cnn import save
from train_digits_cnn import Bytes, Floats, Labels, render_digits

ROOT = Path(__file__).resolve().parent.parent
CELLS = 3  # digits stand in a loose grid of 3 x 3 cells
CELL = 32  # pixels
IMAGE = CELLS * CELL  # pixels: the side of a picture
PATCH = 8  # pixels: the side of a patch
ZOOM = 1.25  # digits of 28 x 28 are drawn this many times larger
DIGITS = 5  # digits in a picture
NOTHING = 10  # the class of a patch without a digit, and of a picture without a pair
NO_PAIR = 0.15  # the share of pictures without a pair
PATCH_WEIGHT = 0.5  # of the patches' loss, beside that of the class token


class Picture(NamedTuple):
    """A picture, and what it shows."""

    pixels: Bytes
    """[96, 96, 3], uint8."""
    pair: int
    """The digit that stands there twice, or NOTHING."""
    patches: Labels
    """[12, 12]: the digit whose box holds the middle of a patch, or NOTHING."""


class Glyphs(NamedTuple):
    """Digits to put into pictures."""

    masks: Floats
    """[N, 32, 32]: 0 (ground) to 1 (stroke)."""
    labels: Labels
    """[N], 0..9."""


def build_model() -> VisionTransformer:
    """Return the untrained network: [N, 3, 96, 96] in 0..1 to class scores [N, 11]."""
    stem = [
        ConvStemConfig(out_channels=16, kernel_size=3, stride=2),
        ConvStemConfig(out_channels=32, kernel_size=3, stride=2),
        ConvStemConfig(out_channels=48, kernel_size=3, stride=2),
        ConvStemConfig(out_channels=48, kernel_size=3, stride=1),
    ]
    return VisionTransformer(
        image_size=IMAGE,
        patch_size=PATCH,
        num_layers=4,
        num_heads=4,
        hidden_dim=48,
        mlp_dim=96,
        num_classes=NOTHING + 1,
        conv_stem_configs=stem,
    )


def draw_glyphs(count: int, random: np.random.Generator) -> Glyphs:
    """Draw random digits as large as a cell, without the noise of their ground."""
    images, labels = render_digits(count, random)
    strokes = torch.from_numpy((images - 0.15) / 0.6).clamp(0, 1)
    larger = nn.functional.interpolate(strokes, scale_factor=ZOOM, mode="bilinear")
    border = (larger.shape[-1] - CELL) // 2
    masks = larger[:, 0, border : border + CELL, border : border + CELL]
    return Glyphs(masks=masks.numpy(), labels=labels)


def choose_digits(random: np.random.Generator) -> tuple[int, list[int]]:
    """Return the digit that is there twice (or NOTHING), and the digits of a picture."""
    if random.random() < NO_PAIR:
        return NOTHING, random.permutation(10)[:DIGITS].tolist()
    digits = random.permutation(10)[: DIGITS - 1].tolist()
    return digits[0], [*digits, digits[0]]


def draw_ground(random: np.random.Generator) -> Floats:
    """Return a dark ground [96, 96, 3] in 0..1 that turns from one colour to another."""
    corners = random.uniform(0.05, 0.42, (2, 2, 3))
    along = np.linspace(0, 1, IMAGE)[:, None, None]
    left = corners[0, 0] * (1 - along) + corners[1, 0] * along
    right = corners[0, 1] * (1 - along) + corners[1, 1] * along
    across = along.reshape(1, IMAGE, 1)
    return np.asarray(left * (1 - across) + right * across, dtype=np.float32)


def bright_colour(random: np.random.Generator) -> Floats:
    """Return a colour [3] of a random hue whose largest part is 1."""
    colour = random.uniform(0.15, 1, 3)
    return np.asarray(colour / colour.max(), dtype=np.float32)


def draw_picture(glyphs: Glyphs, random: np.random.Generator) -> Picture:
    """Put five digits of random colours into cells of a picture."""
    pair, digits = choose_digits(random)
    canvas = draw_ground(random)
    patches = np.full((IMAGE // PATCH, IMAGE // PATCH), NOTHING, dtype=np.int64)
    cells = random.permutation(CELLS * CELLS)[:DIGITS]
    for digit, cell in zip(digits, cells, strict=True):
        candidates = np.flatnonzero(glyphs.labels == digit)
        mask = glyphs.masks[random.choice(candidates)]
        row, column = divmod(int(cell), CELLS)
        top = row * CELL
        left = column * CELL
        square = canvas[top : top + CELL, left : left + CELL]
        square += mask[..., None] * (bright_colour(random) - square)
        ys, xs = np.nonzero(mask > 0.3)
        middles = np.arange(PATCH // 2, IMAGE, PATCH)
        rows = (middles >= top + ys.min()) & (middles <= top + ys.max())
        columns = (middles >= left + xs.min()) & (middles <= left + xs.max())
        patches[np.ix_(rows, columns)] = digit
    pixels = np.round(canvas * 255).astype(np.uint8)
    return Picture(pixels=pixels, pair=pair, patches=patches)


class Batch(NamedTuple):
    """Pictures to learn from or to test with."""

    images: Tensor
    """[N, 3, 96, 96], float32, in 0..1."""
    labels: Tensor
    """[N, 145]: the pair, then the patches row by row."""


def draw_batch(count: int, glyphs: Glyphs, random: np.random.Generator) -> Batch:
    """Draw random pictures."""
    pictures = [draw_picture(glyphs, random) for _ in range(count)]
    pixels = np.stack([picture.pixels for picture in pictures])
    labels = [[picture.pair, *picture.patches.flat] for picture in pictures]
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    return Batch(images=images, labels=torch.tensor(labels))


def scores_of_tokens(model: VisionTransformer, images: Tensor) -> Tensor:
    """Return the class scores [N, 145, 11] of the class token and of each patch."""
    patches = model._process_input(images)
    first = model.class_token.expand(len(images), -1, -1)
    tokens = model.encoder(torch.cat([first, patches], dim=1))
    return model.heads(tokens)


def accuracy(model: VisionTransformer, batch: Batch) -> tuple[float, float]:
    """Return the shares of pictures and of patches that are named rightly."""
    model.eval()
    with torch.no_grad():
        right = scores_of_tokens(model, batch.images).argmax(-1) == batch.labels
    model.train()
    return right[:, 0].float().mean().item(), right[:, 1:].float().mean().item()


def train(model: VisionTransformer, steps: int, batch_size: int, seed: int) -> None:
    """Train the model in place, each step on new pictures."""
    random = np.random.default_rng(seed)
    glyphs = draw_glyphs(8000, random)
    held_out = draw_batch(300, draw_glyphs(1000, random), random)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-3, total_steps=steps
    )
    model.train()
    for step in range(1, steps + 1):
        batch = draw_batch(batch_size, glyphs, random)
        scores = scores_of_tokens(model, batch.images)
        pair = nn.functional.cross_entropy(scores[:, 0], batch.labels[:, 0])
        patches = nn.functional.cross_entropy(
            scores[:, 1:].flatten(0, 1), batch.labels[:, 1:].flatten()
        )
        optimizer.zero_grad()
        (pair + PATCH_WEIGHT * patches).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            pairs, named = accuracy(model, held_out)
            message = f"step {step}/{steps}: pairs {pairs:.3f}, patches {named:.3f}"
            print(message, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Train a small vision transformer that finds pairs of digits."
    )
    add = parser.add_argument
    out = ROOT / "configs/pairs_vit.pth"
    add("--out", type=Path, default=out, help="where to save it")
    add("--steps", type=int, default=1600, help="of training (default: %(default)s)")
    add("--batch-size", type=int, default=32, help="pictures (default: %(default)s)")
    add("--seed", type=int, default=0, help="of all chance (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    model = build_model()
    train(model, options.steps, options.batch_size, options.seed)
    save(model, options.out)


if __name__ == "__main__":
    # Sums depend on how the work is divided, so one thread makes the result the same
    # everywhere.
    torch.set_num_threads(1)
    main()
