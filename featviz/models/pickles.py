"""Which classes and functions a pickled model names, and which of them may be used.

`torch.load(weights_only=True)` runs only what is on its list. To that list come exactly the
nn.Module classes of torch and torchvision that the file itself names: classes, never functions, so
that nothing in a file can call a downloader; and of nothing else than what the user allows.
"""

from __future__ import annotations

import _compat_pickle  # the standard library's own tables
import functools
import importlib
import pickletools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from featviz.errors import LoadError, UsageError
from featviz.models import sniff
from featviz.models.factory import import_user_module
from featviz.text import quoted

_PACKAGES = ("torch.nn.", "torch.ao.nn.", "torchvision.")
_HARMLESS = {"functools.partial": functools.partial}
"""ViT keeps its norm layer as partial(nn.LayerNorm, eps=...); what it holds is vetted too."""

_CONTAINERS = (
    "builtins.set",
    "collections.Counter",
    "collections.OrderedDict",
    "torch.Size",
    "torch.device",
    "torch.nn.parameter.Parameter",
)

_SHOWN = 20
"""Names that a message lists before it says how many more there are."""

_LEGACY_PICKLES = 5
"""torch's format before 1.6: magic number, protocol, system, the object, the storages' keys."""


def vetted(path: Path, allow: Sequence[str]) -> list[Any]:
    """The classes that the file may use beyond torch's own list. Nothing of it is executed.

    Raises:
        LoadError: it names others; lists them, with the options that would allow them.
        UsageError: a name in `allow` does not exist.
    """
    allowed = {name: _find(name) for name in allow}
    chosen, refused = [], []
    for name in sorted(_named_in(path)):
        target = allowed.get(name) or _HARMLESS.get(name) or _module_class(name)
        if target is None:
            refused.append(name)
        else:
            chosen.append((target, name))
    if refused:
        raise _refusal(path, refused)
    return chosen


def _refusal(path: Path, names: Sequence[str]) -> LoadError:
    shown = [quoted(name) for name in names[:_SHOWN]]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    options = " ".join(f"--allow-global {shlex.quote(name)}" for name in shown)
    return LoadError(
        f"{path.name} needs {', '.join(shown)}{more}, which could run any code; "
        "nothing was executed",
        f"if you trust the file: {options} (or --unsafe-load for all it holds)",
    )


def _find(name: str) -> Any:
    """Import what the user allows by name."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_user_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"--allow-global {name!r} cannot be found: {error}", "pkg.mod.Class"
        ) from error


def _module_class(name: str) -> type[nn.Module] | None:
    """The nn.Module class of torch or torchvision with this very name, else None."""
    module, _, attribute = name.rpartition(".")
    if not name.startswith(_PACKAGES):
        return None
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return None
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        return None
    if issubclass(found, torch.fx.GraphModule):  # makes itself anew by exec of its source
        return None
    return found if found.__module__ == module else None


def _named_in(path: Path) -> set[str]:
    """Global names in the file that are not on torch's own list."""
    if sniff.sniff(path) == sniff.ZIP:
        return set(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    with path.open("rb") as file:
        return {name for name in _globals(file) if not _on_torchs_list(name)}


def _globals(file: BinaryIO) -> set[str]:
    """Names in the leading pickles of the legacy format, by disassembly."""
    names = set()
    for _ in range(_LEGACY_PICKLES):
        strings: list[str] = []
        try:
            for opcode, argument, _position in pickletools.genops(file):
                if isinstance(argument, str) and opcode.name != "GLOBAL":
                    strings.append(argument)
                if opcode.name == "GLOBAL":
                    names.add(_today(*str(argument).split(" ", 1)))
                if opcode.name == "STACK_GLOBAL":
                    names.add(".".join(strings[-2:]))
        except (ValueError, MemoryError):  # no pickle, or one that claims to be huge
            break
    return names


def _today(module: str, name: str) -> str:
    """Names of Python 2, which pickles of protocol 2 keep to, as the unpickler maps them."""
    module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
    return f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{name}"


def _on_torchs_list(name: str) -> bool:
    """Names of tensors, storages and containers; that list itself is torch.load's to enforce."""
    module, _, attribute = name.rpartition(".")
    rebuild = module in ("torch._utils", "torch._tensor") and attribute.startswith("_rebuild")
    storage = module == "torch" and attribute.endswith("Storage")
    return rebuild or storage or name in _CONTAINERS
