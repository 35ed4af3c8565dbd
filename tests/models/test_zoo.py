"""All of torchvision, and timm's families: every leaf is drawn, or named with a reason.

An outside count holds each run: plain forward hooks, which know nothing of featviz,
note every call of every leaf and every tensor that it gave."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from logging import WARNING
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from conftest import SCENES
from tiles import manifest
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchvision import models

from featviz.models.load import LoadedModel
from featviz.options import DrawOptions, InputOptions, RunOptions
from featviz.run import run as pipeline
from models.loading import (
    load_whole,
    nothing_fetched,
    same_modules,
    same_weights,
    uninitialised,
)

LANDSCAPE = SCENES / "landscape.jpg"
SPHERES = SCENES / "spheres.jpg"


@dataclass(frozen=True)
class Case:
    """How a model is fed: as small as it allows."""

    size: tuple[int, int] = (64, 96)
    frames: int | None = None
    """Time steps, for a model of clips."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """For the builder: detectors resize by themselves, and look at many regions."""


FEW = {
    "min_size": 96,
    "max_size": 160,
    "rpn_post_nms_top_n_test": 8,
    "box_detections_per_img": 4,
}
RUN = {
    "fasterrcnn_mobilenet_v3_large_320_fpn": Case(arguments=FEW),
    "r3d_18": Case(frames=4),
    "raft_small": Case((128, 192)),
    "shufflenet_v2_x0_5": Case(),
    "swin_t": Case(),
}
"""One of each kind of forward. (That all 121 are found from their state dicts is
test_weights.py's to show.)"""


def random_weights(module: nn.Module) -> dict[str, Tensor]:
    """A state dict of random weights."""
    generator = torch.Generator().manual_seed(0)
    state: dict[str, Tensor] = module.state_dict()
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1 and name.endswith("weight"):
            state[name] = torch.ones_like(parameter)
        else:
            scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.02
            state[name] = torch.randn(parameter.shape, generator=generator) * scale
    return state


def bare_file(name: str, folder: Path) -> Path:
    """A file that holds a torchvision model's state dict and nothing else."""
    with uninitialised():
        module = models.get_model(name, **nothing_fetched(name))
    path = folder / "weights.pth"
    torch.save(random_weights(module), path)
    return path


def pictures(case: Case, inputs: int, folder: Path) -> list[str]:
    """A scene; a folder of frames for a clip, two scenes for an optical flow."""
    if case.frames is None:
        return [str(LANDSCAPE), str(SPHERES)][:inputs]
    clip = folder / "clip"
    clip.mkdir()
    shutil.copy(LANDSCAPE, clip / "0.jpg")
    shutil.copy(SPHERES, clip / "1.jpg")
    return [str(clip)]


@dataclass
class Count:
    """What plain hooks saw of the leaves: calls, and what each of them gave."""

    calls: Counter[str] = field(default_factory=Counter)
    given: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Things that a call gave, by leaf and call: tensors, and what is none."""


@contextmanager
def counted(module: nn.Module) -> Iterator[Count]:
    count = Count()

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        count.given[name, count.calls[name]] = len(tree_leaves(output)) or 1
        count.calls[name] += 1

    with ExitStack() as hooks:
        for name, leaf in named_leaves(module).items():
            hooks.enter_context(leaf.register_forward_hook(partial(note, name)))
        yield count


def named_leaves(module: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in module.named_modules() if n and not list(m.children())}


def run_all_layers(
    loaded: LoadedModel, images: list[str], folder: Path
) -> dict[str, Any]:
    """Hook every module, draw as little of each as possible, all into one folder, and
    read what became of it."""
    draw = DrawOptions(scale=1, channels="first:2", max_slices=2, flat=True)
    result = pipeline.run(
        loaded, images, RunOptions("re:.", folder / "out", draw=draw), lambda *_: None
    )
    (image,) = result.images
    assert result.exit_code == 0
    assert image.error is None
    drawn = folder / "out" / image.folder
    content = manifest(drawn)
    for row in content["captures"]:
        assert (drawn / row["file"]).stat().st_size
    return content


def check_nothing_is_lost(
    module: nn.Module, image: dict[str, Any], count: Count
) -> None:
    """Each call of each leaf is there once, and what did not run is named."""
    rows = [*image["captures"], *image["skipped"]]
    check_calls(calls_in(rows, module), count)
    check_idle(module, image["never_ran"], set(count.calls))
    assert {row["layer"] for row in rows}.isdisjoint(image["never_ran"])
    for skip in image["skipped"]:
        assert skip["reason"]
    leaves = named_leaves(module)
    for row in image["captures"]:
        check_layout(row, leaves.get(row["layer"]))


def check_idle(module: nn.Module, never_ran: list[str], ran: set[str]) -> None:
    """Leaves that have a forward, and of which no hook told, are named."""
    first_names = leaf_of(module)
    idle = {first_names[name] for name in never_ran if name in first_names}
    assert idle - ran == runnable_leaves(module) - ran


def runnable_leaves(module: nn.Module) -> set[str]:
    """Those that have a forward."""
    return {
        name
        for name, leaf in named_leaves(module).items()
        if type(leaf).forward is not nn.Module.forward
    }


class LeafCall(NamedTuple):
    """A row of a manifest whose layer is a leaf."""

    leaf: str
    """The leaf's first name."""
    layer: str
    """The name under which it ran."""
    call: int


def leaf_of(module: nn.Module) -> dict[str, str]:
    """The first name of each leaf, by all of its names."""
    first_names = {id(leaf): name for name, leaf in named_leaves(module).items()}
    return {
        name: first_names[id(part)]
        for name, part in module.named_modules(remove_duplicate=False)
        if id(part) in first_names
    }


def calls_in(rows: list[dict[str, Any]], module: nn.Module) -> list[LeafCall]:
    """The calls of leaves among the rows of a manifest; a grid and the tokens beside it
    are one output."""
    leaves = leaf_of(module)
    calls = []
    for row in rows:
        is_token = row["key"].rpartition(".")[2] in TOKENS
        if row["layer"] in leaves and not is_token:
            calls.append(LeafCall(leaves[row["layer"]], row["layer"], row["call"]))
    return calls


TOKENS = ("class_token", "distillation_token", "register_tokens", "extra_token")


def check_calls(calls: list[LeafCall], count: Count) -> None:
    """Each leaf gave as much as hooks count; one that has one name in the manifest has
    its calls numbered as they do."""
    outputs = Counter(call.leaf for call in calls)
    assert outputs == Counter(leaf for leaf, _ in count.given.elements())
    names = Counter(leaf for leaf, _ in {(call.leaf, call.layer) for call in calls})
    drawn = Counter((call.leaf, call.call) for call in calls)
    check_numbers(drawn, count, names)


def check_numbers(drawn: Counter[Any], count: Count, names: Counter[nn.Module]) -> None:
    """A leaf that has one name has its calls numbered as hooks count them."""
    for (leaf, number), expected in count.given.items():
        if names[leaf] == 1:
            assert drawn[leaf, number] == expected, leaf


def check_layout(row: dict[str, Any], leaf: nn.Module | None) -> None:
    """Rows of boxes are no map, and convolutions give maps."""
    if row["type"].endswith("Head") and len(row["shape"]) == 3:
        assert row["layout"] == "sequence", row
    if isinstance(leaf, nn.Conv2d) and row["layout"] != "windows":
        expected = "nchw" if row["shape"][0] == 1 else "batch"
        assert row["layout"] == expected, row


TWINS = {"fasterrcnn_mobilenet_v3_large_320_fpn": "fasterrcnn_mobilenet_v3_large_fpn"}
"""Another builder of the same shapes, which a state dict cannot tell apart."""


@pytest.mark.filterwarnings("ignore:The default weight initialization:FutureWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_no_leaf_of_torchvision_is_lost(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """From a bare state dict, without --arch: each call of each leaf is drawn or has a
    reason."""
    case = RUN[name]
    inputs = InputOptions(size=case.size, frames=case.frames or 1)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = bare_file(name, folder)
        with uninitialised():
            loaded = load_whole(path, inputs, model_args=case.arguments)
        path.unlink()
        images = pictures(case, loaded.preprocess.inputs, folder)
        with counted(loaded.module) as count:
            image = run_all_layers(loaded, images, folder)
    assert loaded.source["arch"] in (name, TWINS.get(name))
    check_nothing_is_lost(loaded.module, image, count)
    assert not [record for record in caplog.records if record.levelno >= WARNING]


@dataclass(frozen=True)
class Whole:
    """A model that is saved as a whole, and the size of its input."""

    make: Callable[[], nn.Module]
    size: tuple[int, int] = (64, 64)


def timms(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    return lambda: pytest.importorskip("timm").create_model(name, **arguments)


WHOLE = {
    "ViT": Whole(lambda: models.VisionTransformer(64, 16, 2, 2, 16, 32)),
    "DeiT": Whole(timms("deit_tiny_distilled_patch16_224", img_size=64, depth=2)),
    "Hiera": Whole(timms("hiera_tiny_224", img_size=64, stages=(1, 1, 1, 1))),
    "DaViT": Whole(timms("davit_tiny", depths=(1, 1, 1, 1)), (64, 96)),
    "EfficientViT": Whole(timms("efficientvit_m0"), (224, 224)),
    "LeViT": Whole(timms("levit_128s"), (224, 224)),
    "DLA": Whole(timms("dla46_c"), (64, 96)),
    "GhostNet": Whole(timms("ghostnet_050"), (64, 96)),
    "MobileViT": Whole(timms("mobilevitv2_050"), (64, 96)),
}
"""One of each kind of blocks."""


@pytest.mark.slow
@pytest.mark.parametrize("saved", WHOLE.values(), ids=WHOLE)
def test_no_leaf_of_a_whole_model_is_lost(saved: Whole, tmp_path: Path) -> None:
    """timm's families load from whole files without flags, with the numbers that were
    saved; each call of each leaf is drawn or has a reason."""
    with uninitialised():
        module = saved.make()
    module.load_state_dict(random_weights(module))
    path = tmp_path / "whole.pth"
    torch.save(module, path)
    loaded = load_whole(path, InputOptions(size=saved.size, input_channels=3))
    path.unlink()
    same_modules(loaded.module, module)
    assert same_weights(loaded.module, module)
    with counted(loaded.module) as count:
        image = run_all_layers(loaded, [str(LANDSCAPE)], tmp_path)
    check_nothing_is_lost(loaded.module, image, count)
