"""torch and torchvision: their versions, and one line where they do not fit each other."""

from __future__ import annotations

import atexit
import gc
import sys
from importlib import metadata

from featviz.errors import FeatvizError
from featviz.version import __version__

_NO_MEMORY = ("cannot allocate memory", "failed to map segment", "cannot map")
"""What the system's loader says of a library that does not fit into the memory."""


def require_torch(alone: bool = False) -> None:
    """Import torch and torchvision.

    Meanwhile no garbage is collected: time and again Python would look through some hundred
    thousand objects that all stay.

    Args:
        alone: the process has begun for this, so all that there is stays to its end, and is not
            looked through later either.

    Raises:
        FeatvizError: one is missing, or their builds do not fit, which torchvision shows only as
            `operator torchvision::nms does not exist`.
    """
    first, collecting = "torch" not in sys.modules, gc.isenabled()
    gc.disable()
    try:
        _import()
        if alone and first:
            gc.freeze()
            atexit.register(gc.unfreeze)  # else libraries of torch report leaks at the end
    finally:
        if collecting:
            gc.enable()


def _import() -> None:
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


def lacking(module: str, extra: str, error: ImportError) -> ImportError:
    """The error of a module of featviz for a library that is not installed."""
    return ImportError(f"{module} cannot be used: {error}; pip install 'featviz[{extra}]'")


def versions() -> dict[str, str]:
    """The versions that decide what is computed and drawn, as records name them: those of featviz,
    torch and torchvision."""
    import torch
    import torchvision

    return {
        "featviz": __version__,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
    }


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} (not installed)"
