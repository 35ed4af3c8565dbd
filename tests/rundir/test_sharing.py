"""Images of a run that are held in memory at once."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
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
        assert image.manifest == replace(alone.manifest, files=None)
        assert [row.plan for row in image.manifest.captures] == [
            row.plan for row in alone.manifest.captures
        ]
        assert (image.sizes, image.input_size) == (alone.sizes, alone.input_size)


def test_an_image_takes_less_than_half_of_what_it_takes_alone(tmp_path: Path) -> None:
    """64 images of four layers, held together, against as many that are read one by one. Threads
    that other tests have left behind may take memory meanwhile, so the least of four counts."""
    drawn = [Drawn(f"layer{n}.conv", index=n) for n in range(4)]
    names = [f"{n}.png" for n in range(64)]
    root = write_run(tmp_path / "out", dict.fromkeys(names, drawn))

    def held(read: Callable[[], object]) -> int:
        tracemalloc.start()
        result = read()
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        del result
        return size

    alone = min(held(lambda: [read_image(root, name) for name in names]) for _ in range(4))
    together = min(held(lambda: read_run(root)) for _ in range(4))
    assert together < alone / 2
