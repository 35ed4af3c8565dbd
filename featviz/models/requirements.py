"""torch and torchvision: their versions, and one line where they do not fit each other."""

from __future__ import annotations

import atexit
import ctypes
import gc
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from featviz.errors import FeatvizError
from featviz.version import __version__

_NO_MEMORY = ("cannot allocate memory", "failed to map segment", "cannot map")
"""What the system's loader says of a library that does not fit into the memory."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""The numbers of mallopt(3)."""

_UNFIT = "operator torchvision::"
"""Begins what torchvision says where its operators were built for another torch."""


class UnfitError(FeatvizError):
    """torch or torchvision is missing, or their builds do not fit each other."""


def require_torch(alone: bool = False) -> None:
    """Import torch.

    Args:
        alone: the process has begun for this, so all that there is stays to its end, and is not
            looked through for garbage later.

    Raises:
        UnfitError: it is missing, or does not work.
        FeatvizError: there is too little memory.
    """
    first = "torch" not in sys.modules
    if alone and first:
        _keep_memory()
    _import("torch")
    if alone and first:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else libraries of torch report leaks at the end


def _keep_memory() -> None:
    """Let glibc keep memory that is freed, up to 256 MiB, for arrays of up to 64 MiB.

    Else it gives that of large activations back to the system after each layer, and the next one
    waits for new pages: of vgg16's 160 ms an image, 15.
    """
    if sys.platform == "linux":
        with suppress(AttributeError, OSError):  # another C library
            library = ctypes.CDLL(None)
            library.mallopt(_MMAP_THRESHOLD, 64 * 2**20)
            library.mallopt(_TRIM_THRESHOLD, 256 * 2**20)


def require_torchvision() -> None:
    """Import torchvision, which takes as long as torch; most models of one's own do without it.

    Raises:
        UnfitError: it is missing, or its build does not fit that of torch, which torchvision shows
            only as `operator torchvision::nms does not exist`.
        FeatvizError: there is too little memory.
    """
    if "torchvision" in sys.modules:
        return
    _import("torchvision")
    if gc.get_freeze_count():  # a command has set aside what torch made
        gc.freeze()


@contextmanager
def fitting() -> Iterator[None]:
    """Say in one line where somebody else's code fails because it imports torchvision, and this
    does not fit torch.

    Raises:
        UnfitError: it does not.
    """
    try:
        yield
    except UnfitError:
        raise
    except Exception as error:
        if _UNFIT in str(error):
            raise _unfit(error) from error
        raise


def _import(package: str) -> None:
    """Import a package. Meanwhile no garbage is collected: time and again Python would look through
    some hundred thousand objects that all stay."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        import_module(package)
    except (ImportError, OSError, RuntimeError, AttributeError, MemoryError) as error:
        if any(words in str(error).lower() for words in _NO_MEMORY):
            raise FeatvizError(
                f"there is too little memory to load {package}: {str(error).splitlines()[0]}",
                "raise the limit (ulimit -v); torch takes several GB of addresses",
            ) from error
        raise _unfit(error) from error
    finally:
        if collecting:
            gc.enable()


def _unfit(error: Exception) -> UnfitError:
    return UnfitError(
        f"torch {_version('torch')} and torchvision {_version('torchvision')} cannot be used "
        f"together: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
        "install a pair that fits: pip install --upgrade --force-reinstall torch torchvision",
    )


def lacking(module: str, extra: str, error: ImportError) -> ImportError:
    """The error of a module of featviz for a library that is not installed."""
    return ImportError(f"{module} cannot be used: {error}; pip install 'featviz[{extra}]'")


def versions() -> dict[str, str]:
    """The versions that decide what is computed and drawn, as records name them: those of featviz,
    torch and torchvision."""
    import torch

    return {
        "featviz": __version__,
        "torch": str(torch.__version__),
        "torchvision": _torchvision(),
    }


def _torchvision() -> str:
    """What `torchvision.__version__` would be, with the build's suffix, which pip does not know:
    read, not imported."""
    spec = find_spec("torchvision")
    folders = (spec.submodule_search_locations if spec else None) or ()
    files = [Path(folder, "version.py") for folder in folders]
    text = "".join(file.read_text("utf-8") for file in files if file.is_file())
    found = re.search(r"""^__version__ = ['"]([^'"]+)""", text, re.MULTILINE)
    return found[1] if found else _version("torchvision")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"
