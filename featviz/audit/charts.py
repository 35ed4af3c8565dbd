"""Charts, as PNG bytes: the same numbers give the same file."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_INK, _BAR, _SUSPECT = "#333333", "#6b8cae", "#c0392b"


def apoz_chart(layers: Sequence[tuple[str, float, float]], title: str) -> bytes:
    """Bars of the average percentage of zeros, one for each layer, from the input down.

    Args:
        layers: name, APoZ and share of dead channels, both 0..1.
    """
    names, apoz, dead = zip(*layers, strict=True)
    figure = Figure(figsize=(8, 1.4 + 0.24 * len(layers)), layout="constrained")
    axes = figure.add_subplot()
    rows = range(len(layers))
    axes.barh(rows, [100 * v for v in apoz], color=_BAR, height=0.75, label="APoZ")
    axes.barh(rows, [100 * v for v in dead], color=_SUSPECT, height=0.3, label="dead channels")
    axes.set_yticks(rows, names)
    axes.set(xlim=(0, 100), xlabel="per cent", ylim=(len(layers) - 0.4, -0.6))
    axes.set_title(title, fontsize=10, color=_INK, loc="left")
    axes.xaxis.grid(True, color="#dddddd")
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower right", fontsize=8, ncols=2, frameon=False)
    return _png(figure)


def dead_chart(models: Sequence[str], shares: Mapping[str, Sequence[float | None]]) -> bytes:
    """Lines of the share of channels with a finding over models, in the order given.

    Args:
        shares: for each finding its share in each model, 0..1; None where it was not judged.
    """
    figure = Figure(figsize=(max(6.0, 1.5 + 0.45 * len(models)), 4), layout="constrained")
    axes = figure.add_subplot()
    for finding, values in shares.items():
        heights = [float("nan") if value is None else 100 * value for value in values]
        axes.plot(range(len(models)), heights, marker="o", markersize=4, label=finding)
    axes.set_xticks(range(len(models)), models, rotation=45, ha="right")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("channels, per cent")
    axes.yaxis.grid(True, color="#dddddd")
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, frameon=False)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    FigureCanvasAgg(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()
