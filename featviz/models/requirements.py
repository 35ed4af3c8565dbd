"""torch and torchvision must fit each other; say so in one line where they do not."""

from __future__ import annotations

from importlib import metadata

from featviz.errors import FeatvizError

_NO_MEMORY = ("cannot allocate memory", "failed to map segment", "cannot map")
"""What the system's loader says of a library that does not fit into the memory."""


def require_torch() -> None:
    """Import torch and torchvision.

    Raises:
        FeatvizError: one is missing, or their builds do not fit, which torchvision shows only as
            `operator torchvision::nms does not exist`.
    """
    try:
        import torch
        import torchvision  # noqa: F401
    except (ImportError, OSError, RuntimeError, AttributeError, MemoryError) as error:
        if any(words in str(error).lower() for words in _NO_MEMORY):
            raise FeatvizError(
                f"there is too little memory to load torch: {str(error).splitlines()[0]}",
                "raise the limit (ulimit -v); torch takes several GB of addresses",
            ) from error
        raise FeatvizError(
            f"{_version('torch')} and {_version('torchvision')} cannot be used together: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}",
            "install a pair that fits: pip install --upgrade --force-reinstall torch torchvision",
        ) from error
    del torch


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} (not installed)"
