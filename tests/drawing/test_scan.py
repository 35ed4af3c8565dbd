"""One pass over the values: the compiled loops and numpy against numpy in float64."""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from featviz.drawing import scan

RNG = np.random.default_rng(13)


def _normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def _ending_in(value: float, width: int = 3000) -> np.ndarray:
    """What an activation gives, but for the last value: the loops take another way there."""
    rows = np.maximum(_normal(4, width), 0)
    rows[:, -1] = value
    return rows


def _with(rows: np.ndarray, value: float, share: float = 0.1) -> np.ndarray:
    return np.where(RNG.random(rows.shape) < share, np.float32(value), rows)


MAPS = {
    "normal": _normal(7, 4999),
    "relu": np.maximum(_normal(64, 49), 0),
    "relu, long": _ending_in(0.5),
    "negative at last": _ending_in(-2.5),
    "negative at last, short": _ending_in(-2.5, 200),
    "minus zero at last": _ending_in(-0.0),
    "NaN at last": _ending_in(np.nan),
    "infinite at last": _ending_in(np.inf),
    "-inf at last": _ending_in(-np.inf),
    "one value a row": _normal(5, 1),
    "a row of two blocks and one": _normal(3, 4097),
    "constant": np.full((3, 1000), 0.1, np.float32),
    "zeros of both signs": np.where(_normal(4, 100) > 0, 0.0, -0.0).astype(np.float32),
    "an outlier first": np.concatenate([np.full((4, 1), 1e4, np.float32), _normal(4, 5000)], 1),
    "far from zero": _normal(4, 3000) + np.float32(1e5),
    "nearly constant": np.float32(1) + np.float32(1e-6) * _normal(4, 3000),
    "denormal": _normal(4, 300) * np.float32(1e-40),
    "tiny": _normal(4, 300) * np.float32(1e-25),
    "huge": _normal(4, 300) * np.float32(1e30),
    "largest": np.array([[3.4e38, -3.4e38, 1.0]], np.float32),
    "NaN": _with(_normal(6, 500), np.nan),
    "infinite": _with(_with(_normal(6, 500), np.inf), -np.inf),
    "first is infinite": np.array([[np.inf, 1, 2, 3], [np.nan, -1, 0, 5]], np.float32),
    "none finite": np.array([[np.nan, np.inf], [1, 2]], np.float32),
    "all infinite": np.full((2, 9), np.inf, np.float32),
    "strided": _normal(64, 9, 40).transpose(1, 0, 2)[:, :, ::2].reshape(9, -1)[:, ::3],
}


@pytest.fixture(params=["compiled", "numpy"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(scan, "compiled", lambda: None)
    elif scan.compiled() is None:
        pytest.skip("numba is not installed")


def _expected(rows: np.ndarray) -> np.ndarray:
    """Each row by itself, its finite values in float64."""
    numbers = []
    for row in rows.astype(np.float64):
        values = row[np.isfinite(row)]
        four = [np.nan] * 4
        if len(values):
            four = [values.min(), values.max(), values.mean(), values.std()]
        numbers.append([*four, (row == 0).mean(), (~np.isfinite(row)).sum()])
    return np.array(numbers)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.usefixtures("loops")
def test_statistics_are_those_of_float64(name: str) -> None:
    """Extremes and counts exactly, the deviation within 1e-6, the mean within 1e-6 of both."""
    rows = MAPS[name]
    got, expected = scan.statistics(rows), _expected(rows)
    assert got.dtype == np.float32
    exact = expected.astype(np.float32)
    np.testing.assert_array_equal(got[:, [0, 1, 4, 5]], exact[:, [0, 1, 4, 5]])
    np.testing.assert_allclose(got[:, 3], exact[:, 3], rtol=1e-6, atol=1e-45)
    off = np.abs(got[:, 2] - exact[:, 2])
    assert (off <= 1e-6 * (np.abs(exact[:, 2]) + exact[:, 3]))[~np.isnan(off)].all()
    np.testing.assert_array_equal(np.isnan(off), np.isnan(exact[:, 2]))


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize(("low", "high"), [(np.nan, 0.5), (-0.5, 0.1), (0.0, np.inf)])
@pytest.mark.usefixtures("loops")
def test_values_outside_are_counted_beside_the_statistics(
    name: str, low: float, high: float
) -> None:
    """At the ends or beyond them; NaN is nowhere; the statistics are the same as alone."""
    rows = MAPS[name]
    numbers, outside = scan.statistics_and_outside(rows, low, high)
    expected = (rows <= np.float32(low)).sum(1) + (rows >= np.float32(high)).sum(1)
    np.testing.assert_array_equal(outside, expected)
    np.testing.assert_array_equal(numbers, scan.statistics(rows))


@pytest.mark.parametrize("name", [name for name in MAPS if np.ptp(MAPS[name]) < np.inf])
@pytest.mark.parametrize("top", [None, 255.5])
def test_levels_are_the_same_compiled_or_not(
    name: str, top: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same float32 operations in the same order, so the same bytes."""
    rows = MAPS[name]
    low = rows.min(1)
    span = np.maximum(rows.max(1) - low, np.float32(1e-30))
    factor = (255 / span).astype(np.float32)
    got = scan.quantise(rows, low, factor, 0.5, top)
    monkeypatch.setattr(scan, "compiled", lambda: None)
    np.testing.assert_array_equal(got, scan.quantise(rows, low, factor, 0.5, top))


@pytest.mark.usefixtures("loops")
def test_values_outside_the_limits_are_clipped_and_nan_is_dark() -> None:
    rows = np.array([[-9, 0, 1, 2, 9, np.nan, np.inf, -np.inf]], np.float32)
    one = np.ones(1, np.float32)
    levels = scan.quantise(rows, 0 * one, 100 * one, 0.5, 200.5)
    assert levels.tolist() == [[0, 0, 100, 200, 200, 0, 200, 0]]


def test_without_numba_numpy_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What numba raises where it finds no folder for its cache is no error of the run."""
    monkeypatch.setitem(sys.modules, "featviz.drawing.compiled", None)
    scan.compiled.cache_clear()
    try:
        assert scan.compiled() is None
        assert scan.statistics(np.ones((1, 4), np.float32)).tolist() == [[1, 1, 1, 0, 0, 0]]
    finally:
        scan.compiled.cache_clear()


@pytest.mark.slow
def test_two_threads_keep_their_loops_in_one_folder() -> None:
    """A thread that loads the loops while another does waits, and finds them where that one has put
    them: in a folder below it they would be compiled anew."""
    config = pytest.importorskip("numba").config
    before, folders = config.CACHE_DIR, []

    def enter() -> None:
        with scan.kept_for_the_user():
            folders.append(config.CACHE_DIR)

    other = Thread(target=enter)
    with scan.kept_for_the_user():
        folders.append(config.CACHE_DIR)
        other.start()
        other.join(0.5)
    other.join()
    assert len(set(folders)) == 1 and len(folders) == 2
    assert before == config.CACHE_DIR


LOOP = """
import numba

@numba.njit("float32(float32)", cache=True)
def twice(value):
    return value + value
"""


def test_compiled_loops_are_kept_in_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the package they would outlive it there. The numba of whoever calls featviz keeps its
    own settings. A file with one short loop stands for ours."""
    numba = pytest.importorskip("numba", reason="numba is not installed")
    (tmp_path / "one_loop.py").write_text(LOOP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    stand_in = {"featviz.drawing.compiled": "one_loop"}
    real = scan.import_module
    monkeypatch.setattr(scan, "import_module", lambda name: real(stand_in.get(name, name)))
    loops = scan.compiled.__wrapped__()
    assert loops is not None and loops.twice(2.5) == 5 and numba.config.CACHE_DIR == ""
    path = Path(loops.twice._cache.cache_path)
    assert path.parent.parent == tmp_path / "featviz" and list(path.glob("one_loop.*.nbi"))


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("name", MAPS)
def test_overall_joins_the_rows(name: str) -> None:
    """The statistics of all rows together are those of all finite values, from float64 numbers."""
    rows = MAPS[name]
    stats = scan.statistics(rows)
    found = scan.overall(stats, rows.shape[1])
    finite = rows[np.isfinite(rows)].astype(np.float64)
    assert found[4] == pytest.approx((rows == 0).mean(), rel=1e-6)
    assert found[5] == rows.size - finite.size
    if not finite.size:
        assert np.isnan(found[:4]).all()
        return
    scale = float(abs(finite).max())
    assert found[:2] == (finite.min(), finite.max())
    assert found[2] == pytest.approx(finite.mean(), rel=1e-5, abs=1e-6 * scale + 1e-44)
    assert found[3] == pytest.approx(finite.std(), rel=1e-4, abs=1e-6 * scale + 1e-44)
