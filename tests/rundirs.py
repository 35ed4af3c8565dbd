"""Run directories of known numbers and pixels, written without a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from featviz.records import GridPlan, Layer
from featviz.rundir.folder import Folder
from featviz.rundir.write import ImageFolder, RunDirectory

RUN_RECORD = {
    "schema_version": 2,
    "featviz": "0.1.0",
    "torch": "2.6.0",
    "model": {},
    "layers": [],
    "options": {},
    "images": {"total": 0, "complete": []},
    "failures": [],
}
"""A run.json that featviz might have written."""


@dataclass(frozen=True)
class Drawn:
    """A tensor of a layer; tile t of a grid is filled with grey `t + shade`."""

    layer: str
    maps: int = 6
    index: int = 1
    type: str = "ReLU"
    kind: str = "output"
    call: int = 0
    key: str = ""
    nrow: int = 3
    padding: int = 2
    tile: tuple[int, int] = (8, 10)
    scale: int | tuple[int, int] = 2
    channels: list[int] | None = None
    slices: tuple[int, int] | None = None
    shade: int = 20
    stats: np.ndarray | None = None
    """[maps, 6]; by default channel c has mean c."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the manifest's row."""

    @property
    def plan(self) -> GridPlan:
        """The geometry."""
        count = len(self.channels) if self.channels else self.maps
        count *= self.slices[0] if self.slices else 1
        scale = (self.scale, self.scale) if isinstance(self.scale, int) else self.scale
        size = (self.tile[0] // scale[0], self.tile[1] // scale[1])
        return GridPlan(
            count, self.nrow, -(-count // self.nrow), size, scale, self.padding
        )

    @property
    def numbers(self) -> np.ndarray:
        """float32 [maps, 6]."""
        if self.stats is not None:
            return self.stats.astype(np.float32)
        c = np.arange(self.maps, dtype=np.float32)
        return np.stack([c - 1, c + 1, c, c / 2 + 0.1, c / 100, 0 * c], axis=1)

    def pixels(self) -> np.ndarray:
        """The grid, uint8 [height, width], tile by tile."""
        plan = self.plan
        picture = np.zeros((plan.height, plan.width), np.uint8)
        for t in range(plan.tile_count):
            row, column = divmod(t, plan.columns)
            top = plan.padding + row * (plan.tile[0] + plan.padding)
            start = plan.padding + column * (plan.tile[1] + plan.padding)
            tile = np.full(plan.tile, (t + self.shade) % 256, np.uint8)
            tile[0, 0] = (255 - t) % 256  # tells a tile that is turned round
            picture[top : top + plan.tile[0], start : start + plan.tile[1]] = tile
        return picture

    def write(self, folder: ImageFolder) -> dict[str, Any]:
        """Write the grid; returns the manifest's row."""
        stem = self.kind + (f".call{self.call}" if self.call else "")
        stem += f".{self.key}" if self.key else ""
        file = folder.file(Layer(self.index, self.layer, self.type), f"{stem}.png")
        with folder.writing(file) as opened:
            Image.fromarray(self.pixels()).save(opened, "PNG")
        row = {
            "layer": self.layer,
            "type": self.type,
            "index": self.index,
            "kind": self.kind,
            "call": self.call,
            "key": self.key,
            "maps": self.maps,
            "shape": [1, self.maps, *self.plan.map_size],
            "layout": "nchw",
            "file": file,
            "grid": {
                "nrow": self.nrow,
                "padding": self.padding,
                "tile": self.tile,
                "scale": self.scale,
            },
            "normalize": "map",
            "range": None,
            **self._totals(),
        }
        if self.channels:
            row["channels"] = self.channels
        if self.slices:
            row["slices"] = self.slices
        return {**row, **self.more}

    def _totals(self) -> dict[str, float]:
        """What a row says of all channels together."""
        means = np.nan_to_num(self.numbers).mean(0)
        return {
            "min": float(means[0]),
            "max": float(means[1]),
            "mean": float(means[2]),
            "std": 1.0,
            "zero_fraction": float(means[4]),
            "nonfinite": int(np.nan_to_num(self.numbers)[:, 5].sum()),
        }


def summed_anew(folder: Path) -> None:
    """Let an image's manifest list its files as they are now, so that changed ones are
    looked into; a manifest that is none stays."""
    path = folder / "manifest.json"
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        content = json.loads(path.read_text() if path.is_file() else "")
        names = ["input.png", "stats.npz"]
        for row in content["captures"]:
            names += filter(None, map(row.get, ("file", "tensor", "figure")))
        unique = dict.fromkeys(names)
        content["files"] = [_listed(folder, name) for name in unique]
        path.write_text(json.dumps(content))


def _listed(folder: Path, name: str) -> dict[str, Any]:
    """The row of a file in a manifest's list; one that cannot be read is empty."""
    data = b""
    with suppress(OSError):
        if (folder / name).is_file():
            data = (folder / name).read_bytes()
    checksum = hashlib.sha256(data).hexdigest()
    return {"file": name, "bytes": len(data), "sha256": checksum}


def write_image(
    store: RunDirectory,
    name: str,
    drawn: Sequence[Drawn],
    skipped: Sequence[Mapping[str, Any]] = (),
    never_ran: Sequence[str] = (),
) -> Path:
    """Write a complete image."""
    folder = store.image(name)
    folder.path.mkdir(parents=True)
    rows = [tensor.write(folder) for tensor in drawn]
    random = np.random.default_rng(len(name))
    seen = random.integers(0, 255, (20, 24, 3), np.uint8)
    with folder.writing("input.png") as opened:
        Image.fromarray(seen).save(opened, "PNG")
    image = {"path": name, "sha256": "0" * 64, "size": {"width": 24, "height": 20}}
    manifest = {
        "image": image,
        "input": {"shape": [1, 3, 20, 24], "preprocessing": "RGB, as it is"},
        "captures": rows,
        "skipped": list(skipped),
        "never_ran": list(never_ran),
    }
    stats = {f"{d.layer}|{d.kind}|{d.call}|{d.key}": d.numbers for d in drawn}
    folder.finish(manifest, stats)
    return folder.path


def write_run(
    root: Path,
    drawn: Mapping[str, Sequence[Drawn]],
    failures: Mapping[str, str] | None = None,
    /,
    **record: Any,
) -> Path:
    """Write a run directory of complete images."""
    store = RunDirectory(Folder.open(root))
    for name, tensors in drawn.items():
        write_image(store, name, tensors)
    failures = failures or {}
    content = {
        "featviz": "0.1.0",
        "torch": "2.15.0",
        "device": "cpu",
        "model": {
            "kind": "torchvision",
            "name": "resnet18",
            "weights": "none",
            "seed": 0,
        },
        "preprocessing": "RGB, as it is",
        "layers": ["conv1", "relu"],
        "options": {"layers": None, "normalize": "map", "cmap": "grey", "nrow": None},
        "images": {"total": len(drawn) + len(failures), "complete": list(drawn)},
        "failures": [
            {"image": name, "error": error} for name, error in failures.items()
        ],
    }
    store.write_run({**content, **record})
    return root
