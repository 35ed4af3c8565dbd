"""Images of a run that are held in memory at once."""

from __future__ import annotations

import subprocess
import sys
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


MEASURED = """
import sys, tracemalloc
from pathlib import Path
from featviz.rundir.image import read_image
from featviz.rundir.read import read_run

def held(read):
    tracemalloc.start()
    result = read()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return size

root, names = Path(sys.argv[1]), sys.argv[2:]
for read in (lambda: [read_image(root, name) for name in names], lambda: read_run(root)):
    print(min(held(read) for _ in range(3)))
"""


def test_images_together_take_little_more_than_half(tmp_path: Path) -> None:
    """64 images of four layers, held together, against as many that are read one by one; in a
    process of its own, where nothing else was read before."""
    drawn = [Drawn(f"layer{n}.conv", index=n) for n in range(4)]
    names = [f"{n}.png" for n in range(64)]
    root = write_run(tmp_path / "out", dict.fromkeys(names, drawn))
    command = [sys.executable, "-c", MEASURED, str(root), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    alone, together = map(int, done.stdout.split())
    assert together < 0.6 * alone
