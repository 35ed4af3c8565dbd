"""`featviz.ray.run`: what workers of a real Ray on this machine draw is what one
process draws."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from threading import Thread
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from PIL import Image
from runs import complete, make_photos, run_json, tree, wait_for
from torch import nn

import featviz as fv
from featviz.errors import FeatvizError, StoreError, UsageError

NET = """
import os, time, torch
from pathlib import Path

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)

    def forward(self, x):
        if float(x.min()) > 2.0 and {dies}:
            os._exit(9)
        time.sleep({pause})
        if float(x.max()) < -1.7:
            raise ValueError("too dark")
        return self.conv(x)

def first_time():
    try:
        os.close(os.open(Path(__file__).with_name("died"), os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False
"""
"""A model that ends its process on a white image if `dies`, and fails on a black one.
"""

SMALL = {"size": 16, "seed": 3}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Eight pictures, one of them white, one black, and one that is no picture."""
    folder = make_photos(tmp_path / "photos", 8)
    Image.new("RGB", (16, 16), "white").save(folder / "04.png")
    Image.new("RGB", (16, 16), "black").save(folder / "06.png")
    (folder / "07.png").write_bytes(b"no picture")
    return folder


def write_net(folder: Path, dies: str, pause: float = 0) -> str:
    """The MODEL string of a network in a file."""
    (folder / "net.py").write_text(NET.format(dies=dies, pause=pause))
    return f"{folder / 'net.py'}:Net"


def outcomes_of(run: Any) -> list[tuple[str, Any]]:
    """The images of a run in their order, each with its error."""
    return [(image.name, image.error) for image in run.images]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_workers_draw_what_one_process_draws(photos: Path, tmp_path: Path) -> None:
    """Bytes, failures and order are the same, though one of two workers dies over an
    image."""
    import featviz.ray

    net = write_net(tmp_path, "first_time()")
    out = tmp_path / "ray"
    run = featviz.ray.run(net, str(photos), "Conv2d", out, workers=2, **SMALL)

    assert (tmp_path / "died").exists()
    expected = fv.run(net, str(photos), "Conv2d", tmp_path / "local", **SMALL)
    assert tree(out) == tree(tmp_path / "local")
    assert len(complete(out)) == 6
    assert outcomes_of(run) == outcomes_of(expected)
    assert np.array_equal(run.captures[0].stats, expected.captures[0].stats)
    with pytest.raises(StoreError, match="holds a run, 6 images complete"):
        featviz.ray.run(net, str(photos), "Conv2d", out, **SMALL)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_images_of_archives_keep_their_order(tmp_path: Path) -> None:
    """Each worker draws one archive of its own, and the images stand as in one process."""
    import featviz.ray

    archives: list[str] = []
    for name, count in (("first", 3), ("second", 2)):
        folder = make_photos(tmp_path / name, count)
        archives.append(shutil.make_archive(str(folder), "zip", folder))
    # one that fails stands in no list of run.json with those that are complete
    with ZipFile(archives[0], "a") as archive:
        archive.writestr("00a.png", b"no picture")
    model = nn.Conv2d(3, 4, 3)

    run = featviz.ray.run(model, archives, out=tmp_path / "ray", workers=2, size=16)

    expected = fv.run(model, archives, out=tmp_path / "local", size=16)
    assert len(expected.images) == 6
    assert outcomes_of(run) == outcomes_of(expected)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_module_and_images_in_memory_go_to_the_workers(tmp_path: Path) -> None:
    """A module of this process and a transform of the caller's are used."""
    import featviz.ray

    model = nn.Conv2d(3, 4, 3)
    images = [torch.zeros(3, 8, 8)]
    remote = tmp_path / "ray"
    local = tmp_path / "local"

    def transform(image: Image.Image) -> torch.Tensor:
        return torch.full((3, 8, 8), float(image.width))

    featviz.ray.run(model, images, out=remote, workers=1, transform=transform)
    fv.run(model, images, out=local, transform=transform)
    assert tree(remote) == tree(local)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_worker_that_dies_again_and_again_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is one error, when Ray has tried it three times."""
    ray = pytest.importorskip("ray", reason="featviz.ray needs Ray")
    import featviz.ray

    def get(task: object) -> object:
        raise ray.exceptions.WorkerCrashedError

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(FeatvizError, match="a worker of Ray has died 3 times"):
        featviz.ray.run(nn.Conv2d(3, 4, 3), [torch.zeros(3, 8, 8)], workers=1)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_signal_ends_all_workers(photos: Path, tmp_path: Path) -> None:
    """They end after their current image, with the code of an interruption; resuming
    completes the run."""
    import featviz.ray

    net = write_net(tmp_path, "False", pause=0.3)
    out = tmp_path / "out"

    def interrupt() -> None:
        wait_for(1, out)
        os.kill(os.getpid(), signal.SIGTERM)

    ending = Thread(target=interrupt)
    ending.start()
    run = featviz.ray.run(net, str(photos), "Conv2d", out, **SMALL)
    ending.join()

    assert run.exit_code == 130
    assert 1 <= len(complete(out)) < 6
    assert run.missing
    assert run_json(out)["images"]["missing"] == sorted(run.missing)
    fv.run(net, str(photos), "Conv2d", out, resume=True, **SMALL)
    fv.run(net, str(photos), "Conv2d", tmp_path / "local", **SMALL)
    assert tree(out) == tree(tmp_path / "local")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"workers": 0}, "workers=0: expected a number ≥ 1"),
        ({"cpus": float("nan")}, "cpus=nan: expected a number ≥ 0"),
        ({"gpus": -0.5}, "gpus=-0.5: expected a number ≥ 0"),
        ({"shard": "1/2"}, "shard is not for workers of Ray"),
        ({"cmap": "greyy"}, "greyy"),
    ],
)
def test_bad_keywords(
    keywords: dict[str, object], message: str, photos: Path, tmp_path: Path
) -> None:
    """They are refused by their names in Python, before anything is written."""
    pytest.importorskip("ray", reason="featviz.ray needs Ray")
    import featviz.ray

    with pytest.raises(UsageError, match=message):
        featviz.ray.run("resnet18", str(photos), out=tmp_path / "out", **keywords)
    assert not (tmp_path / "out").exists()


@pytest.mark.medium
def test_without_ray(
    monkeypatch: pytest.MonkeyPatch, photos: Path, tmp_path: Path
) -> None:
    """The error is one line with the command that installs it."""
    import sys

    import featviz.ray

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FeatvizError, match="ray is not installed") as raised:
        featviz.ray.run("resnet18", str(photos), out=tmp_path / "out")
    assert raised.value.hint == "pip install 'featviz[ray]'"
