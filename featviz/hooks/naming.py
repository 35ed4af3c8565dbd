"""The classes that modules stand for."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def class_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the module's class and its bases.

    A module of torch.export's unflattened programs knows the class that it stands for by name;
    that class is looked up among the modules already imported, and nothing is imported for it.
    """
    found: Any = type(module)
    if found.__module__ == "torch.export.unflatten" and (original := module.type_name()):  # type: ignore[operator]
        home, _, name = original.rpartition(".")
        found = vars(sys.modules.get(home, object)).get(name)
        if not isinstance(found, type):
            return (name, nn.Module.__name__)
    return tuple(c.__name__ for c in found.__mro__ if c is not object)
