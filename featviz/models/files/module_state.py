"""Whether modules from a file are what their classes are: state that calls nothing, in bounds.

Their attributes were put in place as they are in the file; no method of a module has run before
`check` has looked at all of them.
"""

from __future__ import annotations

import functools
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from featviz.models.files.kept_values import is_own_forward
from featviz.models.files.pickles import Vocabulary
from featviz.models.files.rebuilding import Budget, RefusedError
from featviz.models.files.unpickler import parts
from featviz.text import quoted

_DEEPEST = 200
"""Containers inside one another; a module and its dict of modules are two."""

_MOST_WRITTEN, _MOST_REPEATED = 10**6, 4
"""Values that a container may stand for, and this many times all values of the file beside."""

_MOST_VISITS = 100_000
"""Modules that a walk over a model may meet, a shared one each time."""

_FRESH = vars(nn.Module())
_CONTENTS = {"_parameters": (Tensor,), "_buffers": (Tensor,), "_modules": (nn.Module,)}
_HOOKS = {n for n, v in _FRESH.items() if isinstance(v, dict)} - set(_CONTENTS)
_FLAGS = ("_with_kwargs", "_always_called")
"""Ends of the names of dicts that say of hooks how they are called."""

_NAME = re.compile(r"[^.\0\ud800-\udfff]+")
"""Names of modules: torch wants no dots, and results are filed under them."""

LONGEST_PATH = 3000
"""Characters of the way to a module, which results are filed under."""

_MULTIPLIED = {"num_heads", "head_dim"}
"""What `__setstate__` of Ultralytics multiplies."""

_PLAIN = (bool, int, float, str, type(None))


def check(content: Any, made: Sequence[Any], vocabulary: Vocabulary, budget: Budget) -> None:
    """Hold what a file made against what its classes make, then let the classes finish it.

    Args:
        made: modules and helpers whose attributes were put in place.

    Raises:
        RefusedError: state that would call something, a module without its parts, or a model that
            takes more memory or time than its file.
    """
    for item in made:
        if isinstance(item, nn.Module):
            _check_state(item, vocabulary, budget)
        elif not isinstance(item, functools.partial):
            _check_names(item, vocabulary)
    _check_depth(content)
    trees = _Trees()
    for item in made:
        if isinstance(item, nn.Module):
            _finish(item)
            trees.check(item, budget)
    for item in made:
        if isinstance(item, nn.Module) and not is_sound(item):
            raise broken(item)


def is_sound(module: nn.Module) -> bool:
    """Whether all that nn.Module keeps is there, and of its kind."""
    attributes = vars(module)
    return all(
        name in attributes
        and (not isinstance(value, (bool, dict, set)) or type(attributes[name]) in _kin(value))
        for name, value in _FRESH.items()
    )


def _kin(value: Any) -> tuple[type, ...]:
    return (dict, OrderedDict) if isinstance(value, dict) else (type(value),)


def broken(module: nn.Module) -> RefusedError:
    """The error for a module that torch could not use."""
    return RefusedError(
        f"holds a broken {type(module).__name__}: it lacks parts of an nn.Module, "
        "or contains itself"
    )


def _check_state(module: nn.Module, vocabulary: Vocabulary, budget: Budget) -> None:
    attributes = vars(module)
    _check_names(module, vocabulary)
    for name, kinds in _CONTENTS.items():
        items = attributes.get(name, 0)
        if isinstance(items, dict):
            budget.objects.take(1 + len(items))  # it may be shared with many others
        if type(items) not in (dict, OrderedDict) or not all(
            type(key) is str and (value is None or isinstance(value, kinds))
            for key, value in items.items()
        ):
            raise broken(module)
    if not all(_NAME.fullmatch(name) for name in attributes["_modules"]):
        raise RefusedError(f"holds a {type(module).__name__} with a module of an impossible name")
    for name in _HOOKS & attributes.keys():
        hooks = attributes[name]
        if type(hooks) not in (dict, OrderedDict):
            raise broken(module)
        budget.objects.take(1 + len(hooks))
        flags = bool if name.endswith(_FLAGS) else ()
        if not all(isinstance(v, flags) or vocabulary.trusts(v) for v in hooks.values()):
            raise RefusedError(
                f"holds a {type(module).__name__} with {name}, which would call what the file says"
            )
    for name in ("training", "_is_full_backward_hook"):
        if type(attributes.get(name)) not in (bool, type(None)):
            raise broken(module)
    if isinstance(module, nn.RNNBase):
        _check_recurrent(module)
    for name in _MULTIPLIED & attributes.keys():
        if type(attributes[name]) is not int:
            raise broken(module)


def _check_names(item: Any, vocabulary: Vocabulary) -> None:
    """No attribute takes the place of what the class defines."""
    for name, value in vars(item).items():
        owner = next((kind for kind in type(item).__mro__ if name in vars(kind)), None)
        if owner is None and not name.startswith("__"):
            continue
        default = None if owner is None else vars(owner)[name]
        harmless = owner and not callable(default) and not hasattr(type(default), "__get__")
        if (harmless and _is_data(value)) or vocabulary.trusts(value):
            continue
        if isinstance(item, nn.Module) and _is_of_ultralytics(name, value, item):
            continue
        if name == "all_weights" and isinstance(item, nn.RNNBase):  # of torch before 1.0
            continue
        raise RefusedError(
            f"holds a {type(item).__name__} whose state replaces its {quoted(name)}: "
            "it could run code"
        )


def _is_of_ultralytics(name: str, value: Any, module: nn.Module) -> bool:
    """Whether an attribute is one that Ultralytics sets on modules of any class: a text about the
    layer, or another of its own forward methods where a convolution is fused."""
    if name == "type":
        return type(value) is str
    return name == "forward" and is_own_forward(value, module)


def _is_data(value: Any) -> bool:
    """Whether a value is a number, a text, a tensor or a short list of numbers and texts."""
    if isinstance(value, (list, tuple)):
        return all(type(item) in _PLAIN for item in value)
    return type(value) in _PLAIN or isinstance(value, Tensor)


def _check_recurrent(module: nn.RNNBase) -> None:
    """`__setstate__` counts up to `num_layers` in files of old versions."""
    attributes = vars(module)
    layers, names = attributes.get("num_layers"), attributes.get("_flat_weights_names", [])
    sound = type(layers) is int and 0 < layers <= max(1, len(attributes.get("_parameters", ())))
    if not sound or type(names) is not list or not all(type(name) is str for name in names):
        raise broken(module)


def _finish(module: nn.Module) -> None:
    """Let the class add what files of older versions lack."""
    try:
        module.__setstate__(dict(vars(module)))  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever a state that a file made up leads to
        raise broken(module) from error


def _check_depth(content: Any) -> None:
    """Refuse containers too deep inside one another, and few that stand for very many, which
    would fill the memory where they are written out; what lies inside itself counts once."""
    depths: dict[int, int] = {}
    sizes: dict[int, int] = {}
    seen = 0
    path = [_Open(content)]
    open_now = {id(content)}
    while path:
        top = path[-1]
        for item in top.inner:
            top.size += sizes.get(id(item), 1)
            if id(item) in depths:
                top.depth = max(top.depth, 1 + depths[id(item)])
            elif id(item) not in open_now and parts(item):
                path.append(_Open(item))
                open_now.add(id(item))
                break
        else:
            path.pop()
            open_now.discard(id(top.value))
            seen += len(parts(top.value))
            depths[id(top.value)] = top.depth
            sizes[id(top.value)] = 1 if isinstance(top.value, nn.Module) else top.size
            if top.size > _MOST_WRITTEN + _MOST_REPEATED * seen:
                raise RefusedError(
                    f"holds a {type(top.value).__name__} that repeats its parts beyond all bounds"
                )
            if path:
                path[-1].depth = max(path[-1].depth, 1 + top.depth)
                path[-1].size += sizes[id(top.value)]
        if top.depth > _DEEPEST or len(path) > _DEEPEST:
            raise RefusedError(
                f"holds more than {_DEEPEST} levels of containers inside one another"
            )


class _Open:
    """A container on the way down: what is left to see of it, how deep it is, and how many values
    it has, those of a shared one each time."""

    def __init__(self, value: Any) -> None:
        self.value, self.inner = value, iter(parts(value))
        self.depth, self.size = 1, 0


class _Trees:
    """What a walk over a module meets: torch walks into a shared module each time."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int, int] | None] = {}

    def check(self, module: nn.Module, budget: Budget) -> None:
        """Refuse a module that contains itself, or that is larger than its file can be."""
        visits, size, longest = self._measure(module)
        if longest > LONGEST_PATH:
            raise RefusedError(f"holds a module under a name of {longest:,} characters")
        if visits > _MOST_VISITS or size > budget.most:
            raise RefusedError(
                f"holds a {type(module).__name__} that repeats its parts beyond all bounds"
            )

    def _measure(self, module: nn.Module) -> tuple[int, int, int]:
        """Modules, and bytes of parameters and buffers, those of a shared one each time; and
        characters of the longest way to a module."""
        if id(module) not in self._known:
            self._known[id(module)] = None
            tensors = [*module._parameters.values(), *module._buffers.values()]
            size = sum(t.numel() * max(4, t.element_size()) for t in tensors if t is not None)
            visits, longest = 1, 0
            for name, child in module._modules.items():
                if child is not None:
                    more, bytes_below, way = self._measure(child)
                    visits, size = visits + more, size + bytes_below
                    longest = max(longest, len(name) + 1 + way)
            self._known[id(module)] = visits, size, longest
        measures = self._known[id(module)]
        if measures is None:
            raise broken(module)
        return measures
