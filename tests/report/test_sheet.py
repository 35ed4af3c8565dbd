"""`featviz sheet`: tiles of many grids in one picture, pixel for pixel."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from conftest import Run
from PIL import Image
from rundirs import Drawn, summed_anew, write_run

from featviz.errors import StoreError, UsageError
from featviz.options.commands import SheetOptions
from featviz.report.sheet import make_sheet, sort_channels
from featviz.rundir.read import read_run

PAPER = 255


def cut(drawn: Drawn, tile: int) -> np.ndarray:
    """A tile of a grid, by make_grid's arithmetic (torchvision.utils.make_grid)."""
    height = drawn.tile[0] + drawn.padding
    width = drawn.tile[1] + drawn.padding
    y, x = divmod(tile, drawn.nrow)
    top = y * height + drawn.padding
    left = x * width + drawn.padding
    return drawn.pixels()[top : top + drawn.tile[0], left : left + drawn.tile[1]]


def find(sheet: np.ndarray, tile: np.ndarray) -> tuple[int, int] | None:
    """Where a tile stands in a sheet; top and left, None where it does not."""
    windows = np.lib.stride_tricks.sliding_window_view(sheet, tile.shape)
    places = np.argwhere((windows == tile).all((2, 3)))
    assert len(places) <= 1, "tiles are told apart by their pixels"
    return tuple(map(int, places[0])) if len(places) else None


def sheet_of(root: Path, **options: object) -> np.ndarray:
    """A sheet's pixels, grey."""
    out = root.parent / "sheet.png"
    make_sheet(root, SheetOptions(**{"layer": "relu", "out": out, **options}))  # type: ignore[arg-type]
    with Image.open(out) as picture:
        assert picture.mode == "RGB"
        pixels = np.asarray(picture)
    own = pixels[..., 0]
    return own


A = Drawn("relu", shade=20)
B = Drawn("relu", shade=120)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two images, six channels."""
    return write_run(tmp_path / "out", {"a.png": [A], "b.png": [B]})


@pytest.mark.parametrize("transpose", [False, True])
def test_columns_are_images_and_rows_are_channels(root: Path, transpose: bool) -> None:
    """Every tile is there once, pixel for pixel, at its place; transposed, the other
    way round."""
    sheet = sheet_of(root, transpose=transpose)
    positions = np.array([[find(sheet, cut(d, c)) for d in (A, B)] for c in range(6)])
    rows = positions[..., 0]
    columns = positions[..., 1]
    if transpose:
        rows, columns = columns, rows
    assert (rows[:, 0] == rows[:, 1]).all()
    assert (np.diff(rows[:, 0]) > 0).all()
    assert len(set(columns[:, 0])) == 1
    assert (columns[:, 1] > columns[:, 0]).all()


@pytest.mark.parametrize(
    "drawn",
    [
        Drawn("relu", maps=3, slices=(4, 9), nrow=5, padding=0),
        Drawn("relu", maps=4, nrow=4, padding=0, tile=(32, 7), scale=(32, 7)),
    ],
    ids=["slices across rows", "strip"],
)
def test_tiles_are_cut_by_the_manifests_geometry(tmp_path: Path, drawn: Drawn) -> None:
    """Also where maps were left out, where a channel has several tiles, and of a strip."""
    root = write_run(tmp_path / "out", {"a.png": [drawn]})
    sheet = sheet_of(root)
    side = drawn.slices[0] if drawn.slices else 1
    for n in range(drawn.plan.maps // side):
        tiles = np.hstack([cut(drawn, n * side + s) for s in range(side)])
        assert find(sheet, tiles) is not None


def test_a_channel_that_one_image_lacks_leaves_its_place_empty(tmp_path: Path) -> None:
    """--max-maps --pick top draws other channels of each image; rows go by channel."""
    a = Drawn("relu", maps=6, channels=[0, 3], nrow=2, shade=20)
    b = Drawn("relu", maps=6, channels=[3, 5], nrow=2, shade=120)
    root = write_run(tmp_path / "out", {"a.png": [a], "b.png": [b]})
    sheet = sheet_of(root)
    (row_a, _), (row_b, left_edge) = find(sheet, cut(a, 1)), find(sheet, cut(b, 0))  # type: ignore[misc]
    assert row_a == row_b
    first = find(sheet, cut(a, 0))
    assert first is not None
    empty = sheet[first[0] : first[0] + 8, left_edge : left_edge + 10]
    assert (empty == empty[0, 0]).all()
    assert empty[0, 0] not in (PAPER, 0)


def test_order_is_numpys(tmp_path: Path) -> None:
    """The mean over the images, largest first; NaN last, equal ones in their order."""
    rng = np.random.default_rng(3)
    tables = rng.random((2, 8, 6)).round(1)
    tables[:, 5] = np.nan
    tables[1, 2, :4] = np.nan
    images = {
        f"{n}.png": [Drawn("relu", maps=8, stats=own)] for n, own in enumerate(tables)
    }
    runs = read_run(write_run(tmp_path / "o", images)).images.values()
    stats = [next(iter(image.stats().values())) for image in runs]
    for by, column in {"mean": 2, "max": 1, "variance": 3, "zeros": 4}.items():
        every = tables.astype(np.float32)[..., column].T.astype(np.float64)
        every = every**2 if by == "variance" else every
        means = np.array(
            [o[~np.isnan(o)].mean() if (o == o).any() else -9 for o in every]
        )
        assert (
            sort_channels(stats, range(8), by)
            == np.argsort(-means, kind="stable").tolist()
        )


def test_another_tensor_of_the_layer(tmp_path: Path) -> None:
    """--tensor takes the second call; a wrong one names those that there are."""
    second = Drawn("relu", call=1, shade=90)
    root = write_run(tmp_path / "out", {"a.png": [A, second]})
    assert find(sheet_of(root, stem="output.call1"), cut(second, 2)) is not None
    with pytest.raises(UsageError, match=r"relu has no 'grad'") as caught:
        sheet_of(root, stem="grad")
    assert "output, output.call1" in str(caught.value.hint)


def test_refusals(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such layer, no such channel, too large, no image, a broken grid: each in one
    line."""
    with pytest.raises(UsageError, match="the run has no layer 'conv9'") as caught:
        sheet_of(root, layer="conv9")
    assert caught.value.hint == "it has relu"
    with pytest.raises(UsageError, match="channel 6 was not drawn"):
        sheet_of(root, pick="4-9")
    with pytest.raises(UsageError, match="is no channel or range"):
        sheet_of(root, pick="3-1")
    monkeypatch.setattr(import_module("featviz.report.sheet"), "MAX_PIXELS", 100)
    with pytest.raises(UsageError, match="more than Pillow opens"):
        sheet_of(root)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="no complete image"):
        sheet_of(write_run(tmp_path / "empty", {}, {"a.png": "truncated"}))
    broken = [root / name / "001_relu" / "output.png" for name in ("a.png", "b.png")]
    for path in broken:
        path.write_bytes(path.read_bytes()[:-30])
        summed_anew(path.parent.parent)
    with pytest.raises(StoreError, match=r"a\.png/001_relu/output\.png cannot be read"):
        sheet_of(root)


def test_command_line(
    featviz: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default name is the layer's, in the current folder; --json tells what is
    where. Half of a picture is left out by name."""
    path = root / "a.png" / "001_relu" / "output.png"
    path.write_bytes(path.read_bytes()[:-30])
    monkeypatch.chdir(root.parent)
    done = featviz("sheet", root, "--layer", "relu", "--order", "mean", "--json")
    document = {
        "file": "sheet-relu.png",
        "images": ["b.png"],
        "channels": [5, 4, 3, 2, 1, 0],
    }
    assert done.code == 0
    assert json.loads(done.out) == document
    assert "warning: a.png is incomplete (a.png/001_relu/output.png " in done.err
    assert (root.parent / "sheet-relu.png").is_file()


def test_variances_are_averaged_and_not_their_roots() -> None:
    """Deviations of 0 and 5 are more than twice 3."""
    stats = [np.zeros((2, 6), np.float32) for _ in range(2)]
    for own, deviations in zip(stats, ((3, 0), (3, 5)), strict=True):
        own[:, 3] = deviations
    assert sort_channels(stats, range(2), "variance") == [1, 0]
