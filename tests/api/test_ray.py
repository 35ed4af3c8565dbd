"""`featviz.ray.run`: what actors of a real Ray on this machine draw is what one process draws."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from threading import Timer

import pytest
import torch
from PIL import Image
from runs import complete, make_photos, run_json, tree
from torch import nn

import featviz as fv
from featviz.errors import FeatvizError, UsageError
from featviz.pipeline import actors
from featviz.pipeline.actors import _check_same, hands

NET = """
import os, torch
from pathlib import Path

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)

    def forward(self, x):
        if float(x.min()) > 2.0 and {dies}:
            os._exit(9)
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
"""A model that ends its process on a white image if `dies`, and fails on a black one."""

SMALL = {"size": 16, "seed": 3}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Nine pictures, one of them white, one black, and one that is no picture."""
    folder = make_photos(tmp_path / "photos", 9)
    Image.new("RGB", (16, 16), "white").save(folder / "04.png")
    Image.new("RGB", (16, 16), "black").save(folder / "06.png")
    (folder / "07.png").write_bytes(b"no picture")
    return folder


def write_net(folder: Path, dies: str) -> str:
    """The MODEL string of a network in a file."""
    (folder / "net.py").write_text(NET.format(dies=dies))
    return f"{folder / 'net.py'}:Net"


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_actors_draw_what_one_process_draws(photos: Path, tmp_path: Path) -> None:
    """The same bytes, failures and order, though an actor dies over an image; resuming keeps all
    that is complete."""
    import featviz.ray

    net = write_net(tmp_path, "first_time()")
    far = featviz.ray.run(net, str(photos), tmp_path / "far", "Conv2d", actors=2, **SMALL)
    assert (tmp_path / "died").exists()
    near = fv.run(net, str(photos), "Conv2d", tmp_path / "near", **SMALL)
    assert tree(tmp_path / "far") == tree(tmp_path / "near")
    assert len(complete(tmp_path / "far")) == 7
    told = [[(image.name, image.error) for image in run.images] for run in (near, far)]
    assert told[0] == told[1] and len(told[0]) == 9
    assert far.captures[0].stats["mean"].tolist() == near.captures[0].stats["mean"].tolist()
    again = featviz.ray.run(
        net, str(photos), tmp_path / "far", "Conv2d", actors=1, resume=True, **SMALL
    )
    assert [image.error for image in again.images] == [image.error for image in near.images]
    assert tree(tmp_path / "far") == tree(tmp_path / "near")


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_an_image_that_kills_every_actor_is_a_failed_image(photos: Path, tmp_path: Path) -> None:
    """The others are complete, and nothing half-written stays."""
    import featviz.ray

    net = write_net(tmp_path, "True")
    run = featviz.ray.run(net, str(photos), tmp_path / "out", "Conv2d", actors=2, **SMALL)
    errors = {image.name: image.error for image in run.images if image.error}
    assert errors["04.png"] == "2 actors of Ray have died over it"
    assert set(errors) == {"04.png", "06.png", "07.png"}
    assert len(complete(tmp_path / "out")) == 6 and not list((tmp_path / "out").rglob(".*.part"))
    assert run_json(tmp_path / "out")["images"]["missing"] == []


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_module_and_images_in_memory_go_to_the_actors(tmp_path: Path) -> None:
    """A module of this process is given back as it was; a transform of the caller's is used."""
    import featviz.ray

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True)).train()
    images = [torch.full((3, 8, 8), level / 3) for level in range(3)]
    told = {"transform": lambda image: torch.full((3, 8, 8), float(image.size[0]))}
    far = featviz.ray.run(model, images, tmp_path / "far", "Conv2d", actors=1, **told)
    fv.run(model, images, "Conv2d", tmp_path / "near", **told)
    assert tree(tmp_path / "far") == tree(tmp_path / "near") and len(far.images) == 3
    assert model.training and not model[0]._forward_hooks


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_more_actors_than_there_is_room_for(photos: Path, tmp_path: Path) -> None:
    """Those that have begun draw all images; the run does not wait for the others."""
    import featviz.ray

    net = write_net(tmp_path, "False")
    run = featviz.ray.run(net, str(photos), tmp_path / "out", "Conv2d", actors=4, **SMALL)
    assert len(run.images) == 9 and len(complete(tmp_path / "out")) == 7


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_no_room_for_any_actor_is_said(
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: pytest.LogCaptureFixture,
) -> None:
    """With what each takes and what there is; the wait goes on, since a cluster may grow."""
    import featviz.ray

    monkeypatch.setattr(actors, "PATIENCE", 0.5)
    Timer(3, os.kill, (os.getpid(), signal.SIGINT)).start()
    net = write_net(tmp_path, "False")
    run = featviz.ray.run(net, str(photos), tmp_path / "out", "Conv2d", cpus=5, gpus=1, **SMALL)
    assert run.images == () and len(run_json(tmp_path / "out")["images"]["missing"]) == 9
    assert (
        "no actor has begun after 0.5 s: each takes 5 CPUs and 1 GPUs; 2 of 2 CPUs and 0 of 0 GPUs "
        "are free"
    ) in messages.messages


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"actors": 0}, "actors 0 is below 1"),
        ({"gpus": -1}, "gpus -1 is below 0"),
        ({"shard": "1/2"}, "shard divides what Ray divides already"),
        ({"tensorboard": "logs"}, "tensorboard"),
        ({"cmapp": "grey"}, "cmapp"),
    ],
)
def test_bad_keywords(
    keywords: dict[str, object], words: str, photos: Path, tmp_path: Path
) -> None:
    """In the words of Python, before anything is written."""
    pytest.importorskip("ray", reason="featviz.ray needs Ray")
    import featviz.ray

    with pytest.raises(UsageError, match=words):
        featviz.ray.run("resnet18", str(photos), tmp_path / "out", **keywords)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_without_ray(monkeypatch: pytest.MonkeyPatch, photos: Path, tmp_path: Path) -> None:
    """One line with the command that installs it."""
    import sys

    import featviz.ray

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FeatvizError, match="ray is not installed") as raised:
        featviz.ray.run("resnet18", str(photos), tmp_path / "out")
    assert raised.value.hint == "pip install 'featviz[ray]'"


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_actors_that_all_die_end_the_run(photos: Path, tmp_path: Path) -> None:
    """With one error, after as many deaths as are allowed, and not with each image failed."""
    import featviz.ray

    net = write_net(tmp_path, "False")
    source = (tmp_path / "net.py").read_text()
    (tmp_path / "net.py").write_text(
        source + "\nimport sys\nif 'default_worker' in sys.argv[0]:\n    os._exit(9)\n"
    )
    words = "3 actors of Ray have died without drawing an image"
    with pytest.raises(FeatvizError, match=words):
        featviz.ray.run(net, str(photos), tmp_path / "out", "Conv2d", actors=1, **SMALL)
    assert complete(tmp_path / "out") == []
    assert len(run_json(tmp_path / "out")["images"]["missing"]) == 9


def test_an_actor_with_other_versions_is_refused() -> None:
    """It would draw other pictures; the first difference is named."""
    with pytest.raises(FeatvizError, match=r"its torch is \"2.12\", this one's \"2.13\""):
        _check_same({"torch": "2.12", "device": "cpu"}, {"torch": "2.13", "device": "cpu"})


@pytest.mark.parametrize("actors", [1, 2, 5])
@pytest.mark.parametrize("total", [0, 1, 7, 100])
def test_hands_are_a_partition_in_order(total: int, actors: int) -> None:
    """Each image once, eight at most, and the last ones alone."""
    dealt = hands(total, actors)
    assert [number for hand in dealt for number in hand] == list(range(total))
    assert max(map(len, dealt), default=0) <= 8
    assert all(len(hand) == 1 for hand in dealt[-actors:])
