"""torch and other libraries, imported without harm; their versions, and devices."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any

from featviz.errors import FeatvizError, UsageError
from featviz.text import first_line
from featviz.version import __version__

if TYPE_CHECKING:
    import torch

NEUTRAL_FOLDER = Path(__file__).with_name("neutral")
"""A folder of featviz that holds nothing but MATPLOTLIBRC."""

MATPLOTLIBRC = NEUTRAL_FOLDER / "featviz.matplotlibrc"
"""matplotlib's settings for commands: its own defaults, whatever the user has set."""

_IMPORTING = RLock()

_NO_MEMORY = re.compile(
    "cannot allocate memory|failed to map segment|cannot map", re.IGNORECASE
)
"""Messages of the system's loader for a library that does not fit into the memory."""

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
"""Numbers of glibc's mallopt."""


def check_current_folder() -> None:
    """Raise a UsageError if the current folder was removed: relative paths lead nowhere
    then, and oneMKL would end the process without a message."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError(
            "the current folder is not there any more", "cd to a folder that is"
        ) from None


def import_library(name: str) -> Any:
    """Import a library, and return it. During the import NEUTRAL_FOLDER is the current
    folder, since some libraries run files that they find in the current folder, which may
    be a download or shared: `libcuda.so.1` (a RUNPATH of torch's has an empty part),
    `matplotlibrc` (evaluated before matplotlib 3.11), `.numba_config.yaml` (names a cache
    of pickles).

    All threads share the current folder: call this before threads that open files start.

    Raises:
        UsageError: Where the current folder is gone.
        ImportError: Where the library is not installed.
    """
    if name in sys.modules:
        return import_module(name)  # waits for a thread that is importing it
    with _IMPORTING:
        check_current_folder()
        current_folder = Path.cwd()
        os.chdir(NEUTRAL_FOLDER)
        try:
            return import_module(name)
        finally:
            os.chdir(current_folder)


def require_matplotlib() -> None:
    """Import matplotlib.

    Raises:
        FeatvizError: Where matplotlib is not installed, or cannot read its settings.
    """
    try:
        import_library("matplotlib")
    except FeatvizError:
        raise
    except Exception as error:  # a broken matplotlibrc can raise anything
        raise FeatvizError(
            f"matplotlib cannot be imported: {first_line(error)}",
            "is a matplotlibrc damaged? MATPLOTLIBRC=FILE names another",
        ) from error


def require_numba() -> Any:
    """Import numba, and return the module. `import_library` keeps the import from reading a
    `.numba_config.yaml` of the current folder. numba reads that file again later, when it
    compiles; this is prevented here. A numba that was imported before keeps its settings.

    Raises:
        ImportError: Where numba is not installed.
        UsageError: Where the current folder is gone.
    """
    is_first = "numba" not in sys.modules
    numba = import_library("numba")
    if is_first:
        numba.config._config_fname = ""
    return numba


def require_torch(is_command: bool = False) -> None:
    """Import torch, and numba, whose loops every picture needs. Importing numba later would
    change the current folder while threads read images.

    Args:
        is_command: Whether the process runs only this command, so that its memory may be
            set up for it: the garbage collector never looks at the objects of the imports
            again, and glibc keeps freed memory. Otherwise each layer waits for new pages
            (15 of the 160 ms that vgg16 takes for an image).

    Raises:
        FeatvizError: Where torch is missing, does not load, or lacks memory.
        ImportError: Where numba is not installed.
    """
    is_command = is_command and "torch" not in sys.modules
    if is_command and sys.platform == "linux":
        with suppress(AttributeError, OSError):  # another C library
            library = ctypes.CDLL(None)
            library.mallopt(_MMAP_THRESHOLD, 64 * 2**20)
            library.mallopt(_TRIM_THRESHOLD, 256 * 2**20)
    with _without_collection():
        _import("torch")
        require_numba()
        if is_command:
            gc.freeze()
    if is_command:
        atexit.register(gc.unfreeze)  # else libraries of torch report leaks at the end


def require_torchvision() -> None:
    """Import torchvision. It takes as long as torch, and many models do not need it, so it
    is imported only when it is needed.

    Raises:
        FeatvizError: As from `require_torch`.
    """
    if "torchvision" not in sys.modules:
        with _without_collection():
            _import("torchvision")
            if gc.get_freeze_count():  # a command has set aside what torch made
                gc.freeze()


@contextmanager
def _without_collection() -> Iterator[None]:
    """A context without garbage collection for the import of libraries. They leave no
    garbage, and the collector would spend a tenth of a second on torch's objects."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def _import(package: str) -> None:
    """Import torch or torchvision.

    Raises:
        FeatvizError: Where it is not installed, does not load, or lacks memory.
    """
    try:
        import_library(package)
    # SystemError: a library written in C failed without an exception
    except (
        ImportError,
        OSError,
        RuntimeError,
        AttributeError,
        MemoryError,
        SystemError,
    ) as error:
        if isinstance(error, (MemoryError, SystemError)) or _NO_MEMORY.search(
            str(error)
        ):
            raise FeatvizError(
                f"there is too little memory to load {package}: {first_line(error)}",
                "raise the limit (ulimit -v); torch takes several GB of addresses",
            ) from error
        # mostly this is a torchvision whose build does not fit that of torch
        installed = versions()
        index = ""
        # pip would fetch the build for CUDA from PyPI, which has several GB
        if installed["torch"].endswith("+cpu"):
            index = " --index-url https://download.pytorch.org/whl/cpu"
        raise FeatvizError(
            f"torch {installed['torch']} and torchvision {installed['torchvision']}"
            f" cannot be used together: {first_line(error)}",
            "install a pair that fits: pip install --upgrade --force-reinstall torch"
            f" torchvision{index}",
        ) from error


def missing_extra_error(module: str, extra: str, error: ImportError) -> ImportError:
    """The error to raise when a module of featviz needs a library that is not installed.

    Args:
        module: The module: `featviz.ray`.
        extra: The extra of featviz that installs the library.
        error: What the import raised.
    """
    return ImportError(
        f"{module} cannot be used: {error}; pip install 'featviz[{extra}]'"
    )


def versions() -> dict[str, str]:
    """The versions of featviz, torch and torchvision for run.json and other records, or
    `(not installed)`. Nothing is imported, which would take long."""
    installed = {"featviz": __version__}
    for package in ("torch", "torchvision"):
        installed[package] = "(not installed)"
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def import_ultralytics(name: str) -> ModuleType:
    """Import a module of Ultralytics, and return it, without the side effects that the
    first import of the package has: it uses the network, prints to stdout, writes settings,
    and replaces `torch.save` and `PIL.Image.open`.

    Raises:
        ImportError: Where there is no such module.
    """
    import torch
    from PIL import Image

    # a caller who has imported it before has accepted these side effects
    module = sys.modules.get(name)
    if module is not None:
        return module
    variables = ("YOLO_CONFIG_DIR", "YOLO_OFFLINE")
    before = os.environ.copy()
    image_open = Image.open
    torch_save = torch.save
    with TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        os.environ.setdefault("YOLO_CONFIG_DIR", folder)
        os.environ["YOLO_OFFLINE"] = "true"
        try:
            return import_module(name)
        finally:
            Image.open = image_open
            torch.save = torch_save
            for variable in variables:
                del os.environ[variable]
            os.environ |= before


def import_letterbox() -> Any:
    """Import Ultralytics' class LetterBox, and return the class.

    Raises:
        FeatvizError: Where it cannot be imported.
    """
    try:
        return import_ultralytics("ultralytics.data.augment").LetterBox
    except (ImportError, OSError) as error:
        raise FeatvizError(
            f"Ultralytics cannot be imported: {error}",
            "pip install ultralytics; or --preset none with --size HxW",
        ) from error


def check_device(name: str) -> None:
    """Raise a UsageError if a text is not the name of a device on any machine. This does
    not import torch."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", name):
        raise UsageError(
            f"--device {name!r} is no device", "one of auto, cpu, cuda, cuda:N, mps"
        )


def pick_device(name: str) -> torch.device:
    """The device of this machine that `--device` names. `auto` is cuda if the machine has
    it, else mps, else the CPU; if it is cuda, each process of torchrun or SLURM gets its
    own GPU.

    Raises:
        UsageError: Where `name` is no device, or this machine does not have it.
    """
    import torch

    check_device(name)
    if name == "auto" and torch.cuda.is_available():
        # set by torchrun, and by SLURM for each task
        rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID"))
        return torch.device(
            f"cuda:{int(rank) % torch.cuda.device_count()}" if rank else "cuda"
        )
    if name == "auto":
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    device = torch.device(name)
    counts = {"cpu": 1, "mps": int(torch.backends.mps.is_available())}
    count = counts.get(device.type, torch.cuda.device_count())
    if (device.index or 0) >= count:
        raise UsageError(
            f"--device {name}: this machine has {count} {device.type} devices",
            "try --device auto",
        )
    return device
