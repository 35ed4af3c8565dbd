"""Samples of several images: models that take several at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from frames import AS_IS, folder_of, still
from PIL import Image
from tiles import manifest, raw, rows
from torch import Tensor, nn

import featviz as fv
from featviz.errors import UsageError
from featviz.images import find
from featviz.models.presets import images_per_forward
from featviz.records import Sample


class Siamese(nn.Module):
    """Takes two images and tells them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 3, 1, bias=False)
        self.body.weight = nn.Parameter(torch.eye(3)[:, :, None, None])

    def forward(self, a: Tensor, b: Tensor, steps: int = 1) -> Tensor:
        return self.body(a) - self.body(b)


class Means(Siamese):
    """Takes images of different sizes."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
        return self.body(a).mean() - self.body(b).mean()


class Three(Siamese):
    """May take a third image."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor | None = None) -> list[Tensor]:  # type: ignore[override]
        return [self.body(x) for x in (a, b, c) if x is not None]


@pytest.mark.parametrize(
    ("forward", "count"),
    [
        (lambda self, x: x, 1),
        (lambda self, x, y=None: x, 1),
        (lambda self, x, y: x, 2),
        (lambda self, x, y, *z, k=1, **rest: x, 2),
        (lambda self, *x: x, 1),
        (lambda self, x, y, z, *, k: x, 3),
    ],
)
def test_forward_says_how_many(forward: Any, count: int) -> None:
    """Arguments that forward cannot do without are images."""
    model_type = type("Model", (nn.Module,), {"forward": forward})
    assert images_per_forward(model_type()) == count


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image folder of two stills, of the numbers 3 and 5."""
    folder = tmp_path_factory.mktemp("pairs")
    paths = [folder / "a.png", folder / "b.png"]
    still(3).save(paths[0])
    still(5).save(paths[1])
    result = fv.run(
        Siamese(),
        paths,
        "body,Siamese",
        folder / "out",
        size=(6, 8),
        tensors="npy",
        scale=1,
        channels=0,
        **AS_IS,
    )
    assert [image.name for image in result.images] == ["a.png+b.png"]
    return folder / "out" / "a.png+b.png"


@pytest.mark.parametrize(
    ("layer", "call", "number"),
    [
        ("body", 0, 3),
        ("body", 1, 5),
        ("", 0, 3 - 5),
    ],
)
def test_two_images_are_one_sample(
    layer: str,
    call: int,
    number: int,
    pair: Path,
) -> None:
    """Both calls of the shared body are captured, and what the model makes of both."""
    reds = raw(pair, rows(pair)[layer, call, ""])[0, 0]
    assert torch.allclose(reds, torch.full((6, 8), number * 10 / 255))


def test_the_picture_of_the_input_shows_both_images(pair: Path) -> None:
    """Both images stand side by side."""
    pixels = np.asarray(Image.open(pair / "input.png"))
    assert pixels.shape == (6, 16, 3)
    assert pixels[0, [0, 8], 0].tolist() == [30, 50]


def test_the_manifest_names_both_images(pair: Path) -> None:
    """The manifest lists both files, and the shape of each input."""
    content = manifest(pair)
    assert content["image"]["files"] == ["a.png", "b.png"]
    assert content["input"]["shape"] == [[1, 3, 6, 8]] * 2


def test_a_count_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Three images for pairs are refused before anything is written."""
    images = folder_of(tmp_path / "all", 3)
    with pytest.raises(UsageError, match="takes 2 images at once, not 3"):
        fv.run(Three(), images, "body", tmp_path / "out", size=8, **AS_IS)
    assert not (tmp_path / "out").exists()


@pytest.mark.medium
def test_images_per_pass_may_be_set(tmp_path: Path) -> None:
    """images_per_pass=3 gives three images to a forward with an optional third."""
    images = folder_of(tmp_path / "all", 3)
    done = fv.run(Three(), images, "body", size=8, images_per_pass=3, **AS_IS)
    assert [maps.call for maps in done.captures] == [0, 1, 2]


def test_the_folder_of_a_pair_stands_once() -> None:
    """Its name begins with that of the first image."""
    names = ["walk/a.png", "walk/b.png", "run/c.png", "d.png"]
    pairs = find.join_groups([Sample(name, (Path(name),)) for name in names], 2)
    assert [pair.name for pair in pairs] == ["walk/a.png+b.png", "run/c.png+d.png"]
    assert [len(pair.paths) for pair in pairs] == [2, 2]


def test_a_pair_of_clips_has_all_their_frames() -> None:
    """In their order."""
    frames = [Path(f"{name}{number}.png") for name in "ab" for number in range(3)]
    clips = [Sample("a", tuple(frames[:3])), Sample("b", tuple(frames[3:]))]
    (pair,) = find.join_groups(clips, 2)
    assert pair.paths == tuple(frames)


@pytest.mark.medium
def test_consecutive_images_of_a_folder_are_pairs(tmp_path: Path) -> None:
    """The images of a pair follow one another, and may differ in size."""
    for number in range(4):
        still(number, height=5 + number).save(tmp_path / f"{number}.png")
    result = fv.run(Means(), tmp_path, "body", size=6, **AS_IS)
    assert result.failures == ()
    assert [image.name for image in result.images] == ["0.png+1.png", "2.png+3.png"]
