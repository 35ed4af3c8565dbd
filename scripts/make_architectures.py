"""Write featviz/models/architectures.json.gz: tensors of every torchvision model, by
shape.

Beside it names.txt, for hints that need no torch.

    python scripts/make_architectures.py [--out FILE] [NAME ...]

Each model is built twice on the meta device, with two numbers of classes; what differs
between the two is its head: [axis, factor] with size = factor · num_classes. (RegNet's
initialiser copies out of the meta device, so these are built on the CPU.) The same
torchvision gives the same bytes. Names on the command line limit it to these models,
for a trial."""

from __future__ import annotations

import argparse
import gzip
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from torchvision import models

OUT = Path(__file__).parent.parent / "featviz" / "models" / "architectures.json.gz"
CLASSES = (7, 11)

Shapes = dict[str, list[int]]


def shapes(name: str, classes: int) -> Shapes:
    """Shapes of a model's state dict with so many classes, where it has any."""
    parameters = inspect.signature(models.get_model_builder(name)).parameters
    options: dict[str, Any] = {"weights": None}
    if "weights_backbone" in parameters:
        options["weights_backbone"] = None
    if not name.startswith("raft"):
        options["num_classes"] = classes
    try:
        with torch.device("meta"):
            module = models.get_model(name, **options)
    except NotImplementedError:
        module = models.get_model(name, **options)
    return {key: list(value.shape) for key, value in module.state_dict().items()}


def entry(name: str) -> dict[str, Any]:
    """Tensors of a model, and which of them belong to the head."""
    few, many = (shapes(name, classes) for classes in CLASSES)
    head = {}
    for key, shape in few.items():
        for axis, (low, high) in enumerate(zip(shape, many[key], strict=True)):
            if low != high:
                factor = (high - low) // (CLASSES[1] - CLASSES[0])
                assert low == factor * CLASSES[0], key
                head[key] = [axis, factor]
    kept = {
        key: shape
        for key, shape in few.items()
        if not key.endswith("num_batches_tracked")
    }
    return {"tensors": kept, "head": head}


def write(path: Path, names: list[str]) -> None:
    """Write the index, byte for byte the same for the same models."""
    index = {name: entry(name) for name in names}
    text = json.dumps(index, separators=(",", ":"), sort_keys=True)
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def main() -> None:
    """Parse the command line and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    write(args.out, args.names or models.list_models())
    if not args.names:
        names = "".join(f"{name}\n" for name in models.list_models())
        args.out.with_name("names.txt").write_text(names, "utf-8")


if __name__ == "__main__":
    main()
