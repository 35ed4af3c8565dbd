"""Images of a run that are held in memory at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rundirs import Drawn, write_run

from featviz.rundir.image import read_image
from featviz.rundir.read import read_run


def test_images_say_the_same_as_each_read_alone(tmp_path: Path) -> None:
    """Sharing changes no value and mixes no two images up, also where images differ."""
    drawn = {
        "a.png": [Drawn("x"), Drawn("y", index=1)],
        "b.png": [Drawn("x"), Drawn("y", index=1)],
        "c.png": [Drawn("x", maps=7), Drawn("z", index=1)],
    }
    root = write_run(tmp_path / "out", drawn)
    run = read_run(root)
    assert list(run.images) == list(drawn)
    for name, image in run.images.items():
        alone = read_image(root, name)
        assert image.manifest == replace(alone.manifest, files=[])
        assert [row.plan for row in image.manifest.captures] == [
            row.plan for row in alone.manifest.captures
        ]
        assert (image.sizes, image.input_size) == (alone.sizes, alone.input_size)


def test_equal_values_of_several_images_are_one_object(tmp_path: Path) -> None:
    """Of 10,000 images nearly all shapes and grids are the same: they are held once."""
    root = write_run(tmp_path / "out", {name: [Drawn("conv")] for name in ("a.png", "b.png")})
    one, two = (image.manifest.captures[0] for image in read_run(root).images.values())
    assert one.shape is two.shape and one.grid is two.grid and one.layer is two.layer
