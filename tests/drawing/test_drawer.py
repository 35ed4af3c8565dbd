"""Which tile stands where: orders, and one tile for near-equal maps, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drawn_maps import NAN, SITE, noise, tiles_of
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from featviz.drawing import drawer, values
from featviz.drawing.picture import GridPicture, caption, describe, to_image
from featviz.options import DrawOptions

PLAIN = DrawOptions(scale=1)


def channels_of(maps: Tensor) -> tuple[Tensor, np.ndarray]:
    """Maps [N, H, W] as they are compared."""
    return maps.flatten(1), values.statistics(maps)[0]


def drawn(tensor: Tensor, options: DrawOptions) -> GridPicture:
    return drawer.draw(options, SITE, tensor)[""]


def tiles(picture: GridPicture) -> list[np.ndarray]:
    """The tiles of the composed picture."""
    return tiles_of(np.asarray(to_image(picture).convert("RGB")), picture.plan)


def test_correlations_are_numpys() -> None:
    """Pearson's coefficients, with 0 for a constant map."""
    maps = noise(9, 50) * 3 + 7
    assert np.abs(drawer.correlations(maps) - np.corrcoef(maps.numpy())).max() < 1e-5
    maps[4] = 2.5
    found = drawer.correlations(maps)
    assert np.abs(found[4]).max() < 1e-3
    assert np.abs(found[:, 4]).max() < 1e-3


def test_similarity_restores_a_sequence() -> None:
    """A blob that wanders: shuffled, but for the first, its steps come back in their
    order."""
    x = torch.arange(60.0)
    steps = torch.stack([torch.exp(-(((x - at) / 4) ** 2)) for at in range(5, 55, 3)])
    shuffle = [
        0,
        *(1 + torch.randperm(16, generator=torch.Generator().manual_seed(3))).tolist(),
    ]
    found = drawer.by_similarity(*channels_of(steps[shuffle].reshape(17, 6, 10)))
    assert [shuffle[place] for place in found] == list(range(17))


def test_similarity_puts_constants_and_nonfinite_maps_last() -> None:
    """Constants by value, the largest first; a map with NaN at the very end."""
    maps = noise(7, 5, 5)
    maps[0], maps[2], maps[4] = -1.0, 3.0, 0.0
    maps[1, 2, 2] = NAN
    found = drawer.by_similarity(*channels_of(maps))
    assert found[0] == 3
    assert set(found[:3]) == {3, 5, 6}
    assert found[3:] == [2, 4, 0, 1]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 6), st.integers(0, 9999), st.floats(0.05, 1.0)
)
def test_orders_and_groups_are_partitions(
    count: int, side: int, seed: int, threshold: float
) -> None:
    """Every channel has exactly one place, and one group, led by its lowest index."""
    maps = noise(count, side, side, seed=seed).round()
    if seed % 3 == 0:
        maps[seed % count, 0, 0] = NAN
    channels = channels_of(maps)
    assert sorted(drawer.by_similarity(*channels)) == list(range(count))
    groups = drawer.collapse(*channels, threshold)
    assert sorted(c for group in groups.values() for c in group) == list(range(count))
    assert all(leader == group[0] == min(group) for leader, group in groups.items())
    assert list(groups) == sorted(groups)


def test_collapse_joins_copies_and_near_copies() -> None:
    """Scaled and shifted copies are alike, negatives and strangers are not; noise
    counts."""
    base = noise(16, 16)
    near = base + 0.1 * noise(16, 16, seed=1)
    maps = torch.stack([base, noise(16, 16, seed=2), 3 * base + 5, -base, near])
    wanted = float(np.corrcoef(base.flatten(), near.flatten())[0, 1])
    channels = channels_of(maps)
    assert drawer.collapse(*channels, 1.0) == {0: [0, 2], 1: [1], 3: [3], 4: [4]}
    assert drawer.collapse(*channels, wanted - 1e-3) == {0: [0, 2, 4], 1: [1], 3: [3]}
    assert drawer.collapse(*channels, wanted + 1e-3)[0] == [0, 2]


def test_constants_are_alike_only_if_equal() -> None:
    """Zeros join zeros, sevens sevens; NaN joins nothing, not even itself."""
    maps = torch.stack(
        [torch.full((3, 3), v) for v in (0.0, 7.0, 0.0, NAN, 7.0, NAN, 7.5)]
    )
    found = drawer.collapse(*channels_of(maps), 0.5)
    assert found == {0: [0, 2], 1: [1, 4], 3: [3], 5: [5], 6: [6]}


@pytest.mark.parametrize("normalize", ["map", "layer"])
@pytest.mark.parametrize("order", ["mean", "similarity"])
def test_manifest_names_the_channel_of_each_tile(order: str, normalize: str) -> None:
    """The tile at place p is that of channel `channels[p]` in the plain grid."""
    tensor = (
        noise(1, 12, 6, 7) + torch.arange(12).mul(5).remainder(7)[None, :, None, None]
    )
    plain = replace(PLAIN, normalize=normalize)
    picture = drawn(tensor, replace(plain, order=order))  # type: ignore[arg-type]
    row = describe(picture, SITE, tensor.shape, "output.png")
    assert row.channels is not None
    assert sorted(row.channels) == list(range(12))
    if order == "mean":
        assert (
            row.channels
            == np.argsort(-tensor.mean((0, 2, 3)).numpy(), kind="stable").tolist()
        )
    before = tiles(drawn(tensor, plain))
    for channel, tile in zip(row.channels, tiles(picture), strict=True):
        assert np.array_equal(tile, before[channel])


def test_collapse_pick_and_order_work_together() -> None:
    """First groups, of which --channels chooses, and then the order."""
    tensor = noise(1, 8, 9, 9)
    tensor[0, 5], tensor[0, 6], tensor[0, 7] = (
        2 * tensor[0, 1],
        tensor[0, 0],
        tensor[0, 0],
    )
    tensor += torch.tensor([0.0, 9, 1, 8, 2, 3, 0, 0])[None, :, None, None]
    options = replace(PLAIN, collapse=0.99, channels="top:3", order="mean")
    picture = drawn(tensor, options)
    row = describe(picture, SITE, tensor.shape, "output.png")
    assert row.channels == [1, 3, 4]
    assert row.collapsed == {"1": [1, 5]}
    text = caption(row)
    assert text["Maps"] == "3 of 8 (--channels, --collapse)"
    assert text["Channels"] == "1,3-4"
    assert text["Collapsed"] == "1: 1,5"
    all_maps = describe(
        drawn(tensor, replace(PLAIN, collapse=0.99)), SITE, tensor.shape, "output.png"
    )
    assert all_maps.channels == [0, 1, 2, 3, 4]
    assert all_maps.collapsed == {"0": [0, 6, 7], "1": [1, 5]}
    assert caption(all_maps)["Maps"] == "5 of 8 (--collapse)"


def test_shared_tile_is_marked_in_its_corner_alone() -> None:
    """`×3` changes the lower right of one tile; all other pixels stay."""
    tensor = noise(1, 4, 40, 40)
    tensor[0, 2], tensor[0, 3] = tensor[0, 0], tensor[0, 0]
    drawn_tiles = tiles(drawn(tensor, replace(PLAIN, collapse=0.99)))
    plain = tiles(drawn(tensor, PLAIN))
    assert len(drawn_tiles) == 2
    assert np.array_equal(drawn_tiles[1], plain[1])
    different = (drawn_tiles[0] != plain[0]).any(-1)
    assert different.any()
    assert not different[:-9].any()
    assert not different[:, :-13].any()


def test_vectors_keep_their_order() -> None:
    """The numbers of a vector stand by index, and none is left out."""
    tensor = torch.tensor([[255.0, 255.0, 0.0, 90.0]])
    picture = drawn(tensor, replace(PLAIN, order="mean", collapse=0.9))
    assert picture.channels is None
    assert picture.groups == {}
    assert np.asarray(to_image(picture)).tolist() == [[255, 255, 0, 90]]
