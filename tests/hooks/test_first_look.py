"""The first look at a model: which layers are the ends of its stages, told from what ran."""

from __future__ import annotations

from featviz.hooks.first_look import Ran, Size, stages, vectors
from featviz.records import Layer

IMAGE = (64, 64)


def layer(index: int, name: str, *classes: str) -> Layer:
    """A layer as `stages` sees it."""
    return Layer(index, name, classes[0], classes)


def names(*calls: str, several: str = "", unlearned: str = "") -> list[str]:
    """What is chosen of calls written as `NAME CLASS SIDE`, in the order in which they finish; a
    side of 0 stands for no maps."""
    parts = [call.split(" ") for call in calls]
    index = {name: at for at, name in enumerate(sorted({part[0] for part in parts}), 1)}
    ran = [
        Ran(
            layer(index[name], name, kind, *(["_DropoutNd"] if kind == "Dropout" else [])),
            _size(side),
            takes_several=name == several,
            learned=name != unlearned,
        )
        for name, kind, side in parts
    ]
    return [one.name for one in stages(ran, IMAGE)]


def _size(side: str) -> Size | None:
    return (int(side), int(side)) if int(side) else None


def test_the_first_convolution_and_the_outermost_module_at_the_end_of_each_resolution() -> None:
    """A block that ends a resolution goes before the convolution inside it; one place is no map,
    and the model itself is none of its layers."""
    conv, relu = layer(1, "conv", "Conv2d", "_ConvNd"), layer(2, "relu", "ReLU")
    block, inner = layer(3, "b", "Block"), layer(4, "b.c", "Conv2d")
    model = layer(0, "", "Net")
    calls = [
        Ran(conv, (16, 16)),
        Ran(relu, (16, 16), learned=False),
        Ran(inner, (8, 8)),
        Ran(block, (8, 8)),
        Ran(layer(5, "fc", "Linear"), None),
        Ran(model, (4, 4)),
    ]
    assert stages(calls, (16, 16)) == [conv, relu, block]
    assert stages([Ran(layer(0, "", "Conv2d"), (4, 4))], (4, 4)) == []


def test_a_block_is_not_left_at_the_resolution_of_its_first_convolution() -> None:
    """A block expands the channels before its stride: that is no end of the larger resolution."""
    chosen = names(
        "f.0 Conv2d 32",
        "f.1.a.0 Linear 32", "f.1.a Wide 32", "f.1.b Conv2d 16", "f.1.c Conv2d 16", "f.1 Block 16",
        "f.2.a.0 Linear 16", "f.2.a Wide 16", "f.2.b Conv2d 8", "f.2.c Conv2d 8", "f.2 Block 8",
        "f Sequential 8",
    )  # fmt: skip
    assert chosen == ["f.0", "f.1", "f.2"]


def test_blocks_go_before_the_downsampling_that_ends_their_stage() -> None:
    """A stage that ends with its downsampling (Swin of transformers) is shown before it."""
    calls = [
        f"s.{stage}.{part} {kind} {side // 2 if part == 'down' else side}"
        for stage, side in enumerate((32, 16, 8))
        for part, kind in (("b.0.at.q", "Linear"), ("b.0.at", "Mix"), ("b.0", "B"), ("down", "D"))
    ]
    stage_ends = [f"s.{stage} Stage {side}" for stage, side in enumerate((16, 8, 4))]
    calls = [call for n in range(3) for call in (*calls[4 * n : 4 * n + 4], stage_ends[n])]
    assert names("patch Conv2d 32", *calls) == [
        "patch", "s.0.b.0", "s.1.b.0", "s.2.b.0", "s.2.down",
    ]  # fmt: skip


def test_dropout_identity_and_poolings_are_no_ends() -> None:
    """The last layer that changes values is taken; a resolution of poolings alone has no end."""
    chosen = names("a Conv2d 32", "b ReLU 32", "c Dropout 32", "p Pool 16", unlearned="p")
    assert chosen == ["a", "b"]


def test_ways_down_and_up_are_runs_of_their_own() -> None:
    """A network that comes back to a resolution shows the end of both stages there."""
    sides = {"a": 32, "b": 16, "c": 8, "d": 16, "e": 32}
    calls = [f"m.{n}{part} {kind} {s}" for n, s in sides.items()
             for part, kind in ((".x", "Conv2d"), ("", "Block"))]  # fmt: skip
    assert names(*calls) == ["m.a", "m.a.x", "m.b", "m.c", "m.d", "m.e"]


def test_a_head_that_takes_several_maps_is_not_looked_into() -> None:
    """What a head makes of each map is no stage; the head itself is one if it gives a map."""
    trunk = ["a Conv2d 32", "b Conv2d 16", "c Conv2d 8"]
    parts = ["h.0 Linear 32", "h.1 Linear 16", "h.2 Linear 8"]
    assert names(*trunk, *parts, "h Head 32", several="h") == ["a", "b", "c", "h"]
    assert names(*trunk, *parts, "h Head 0", several="h") == ["a", "b", "c"]


def test_blocks_of_one_resolution_are_all_taken() -> None:
    """A row of blocks of one class: each of them, what holds modules behind them, no last norm."""
    blocks = [f"t.{n}{part} {kind} 8" for n in range(3)
              for part, kind in ((".at", "Mix"), ("", "Block"))]  # fmt: skip
    calls = ["p Conv2d 8", *blocks, "t List 8", "z LayerNorm 8"]
    assert names(*calls) == ["p", "t.0", "t.1", "t.2"]
    assert names(*calls[:-1], "u.0 Conv2d 8", "u Neck 8") == ["p", "t.0", "t.1", "t.2", "u"]


def test_a_model_without_maps_shows_its_vectors() -> None:
    """A model of linear layers shows all of these; batches and the model itself are left out."""
    first, second, batched = (layer(i, f"fc{i}", "Linear") for i in (1, 2, 3))
    outputs = [(first, [1, 4]), (second, [1, 2]), (batched, [5, 2]), (layer(0, "", "N"), [1, 2])]
    assert vectors(outputs) == [first, second]
    assert vectors(iter(outputs)) == [first, second]
