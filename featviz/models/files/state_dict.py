"""From what a training script saved to a plain state dict: nested keys and prefixes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from featviz.errors import LoadError
from featviz.models.files.effective import effective, unpacked, unwrapped_names, without_parallel
from featviz.text import listed, quoted

PLAIN = ("state_dict", "model_state_dict", "model", "net", "network", "module", "weights", "params")
AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema_model", "ema", "params_ema")
"""Keys under which checkpoints keep weights; the second are exponential moving averages."""

PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.", "encoder.", "backbone.")
"""What DataParallel, torch.compile, Lightning and training scripts put before names."""

_SIDE_BY_SIDE = ("online_model.", "ema_model.")
"""What the package ema-pytorch puts before the names of the model and of its average."""

_AVERAGED_COUNT = "n_averaged"
"""What AveragedModel (SWA, EMA) keeps beside the weights."""

_MOST = 0.9
"""A prefix counts if so many of the keys have it: losses and metrics may stand beside the model."""

_SAYS_AVERAGED = re.compile(r"(?i)(^|[^a-z])(ema|swa)([^a-z]|$)|averag")
"""In the name of a place: that weights there are averages."""

_DEEPEST, _SHOWN = 4, 6
"""Mappings inside one another that are looked into, and places of weights that an error lists."""


@dataclass(frozen=True)
class Unwrapped:
    """Tensors by name, and what was done to find them, in words."""

    tensors: dict[str, Tensor]
    steps: tuple[str, ...] = ()
    module: nn.Module | None = None
    """Where a whole model lies in the checkpoint, this is it."""


def unwrap(
    content: Any,
    key: str | None = None,
    prefix: str | None = None,
    ema: bool | None = None,
    name: str = "the checkpoint",
) -> Unwrapped:
    """Find the state dict in a checkpoint.

    Args:
        key: where it is (`state_dict`, `models.generator`); None looks in the usual places.
        prefix: what to strip from names; None leaves that to `strip`.
        name: the file, for messages.
        ema: take averaged weights (True), plain ones (False), or plain ones if there are any.

    Raises:
        LoadError: no tensors there; names the keys that are.
    """
    steps: list[str] = []
    inner = _at(content, key, steps) if key else _dig(content, ema, steps, _DEEPEST)
    inner, done = unpacked(inner)
    steps += done
    tensors = _one_of_two(_tensors(inner), ema, steps)
    if not tensors:
        raise _no_average(content, name) if ema and not key else _no_weights(content, key, name)
    if prefix:
        tensors = _without(tensors, prefix, steps)
    return Unwrapped(tensors, tuple(steps), inner if isinstance(inner, nn.Module) else None)


def _no_weights(content: Any, key: str | None, name: str) -> LoadError:
    """The error for a checkpoint without tensors in the usual places, with the places that have
    some."""
    under = f" under {key!r}" if key else ""
    message = f"{name} holds no weights{under}: {_describe(content)}"
    places = [quoted(place) for place in _places(content)]
    if not places:
        return LoadError(message, "give a file that holds a state dict or a model")
    hint = f"--key says where they are, here {listed(places, _SHOWN, ' or ')}"
    return LoadError(message, hint, add=() if key else ("--key", places[0]))


def _no_average(content: Any, name: str) -> LoadError:
    """The error for a checkpoint without averaged weights in the usual places; never a hint at
    plain ones as if they were these."""
    message = f"{name} holds no averaged weights (--ema): {_describe(content)}"
    places = [place for place in _places(content) if _SAYS_AVERAGED.search(place)]
    if not places:
        return LoadError(message, "leave out --ema for the plain ones")
    hint = f"--key says where they are, here {listed(list(map(quoted, places)), _SHOWN, ' or ')}"
    return LoadError(message, hint, add=("--key", places[0]))


def _places(content: Any) -> list[str]:
    """Ways to what holds tensors in a checkpoint, as `--key` takes them, most tensors first."""
    found: list[tuple[int, str]] = []
    waiting, seen = [("", content, 0)], set[int]()
    for way, value, depth in waiting:
        if id(value) in seen or not isinstance(value, Mapping) or depth == _DEEPEST:
            continue
        seen.add(id(value))
        for key, inner in value.items():
            if type(key) is str and not (way and "." in key):
                place = f"{way}.{key}" if way else key
                found += [(len(tensors), place)] if (tensors := _tensors(inner)) else []
                waiting.append((place, inner, depth + 1))
    return [place for _, place in sorted(found, key=lambda one: -one[0])]


def _one_of_two(
    tensors: dict[str, Tensor], ema: bool | None, steps: list[str]
) -> dict[str, Tensor]:
    """Of a state dict that holds the model and its average side by side, one of them."""
    both = [{k for k in tensors if k.startswith(prefix)} for prefix in _SIDE_BY_SIDE]
    return _without(tensors, _SIDE_BY_SIDE[bool(ema)], steps) if all(both) else tensors


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside torch.compile's, DataParallel's or DistributedDataParallel's wrapper.

    A compiled one ignores hooks that come later, or traces them into its graph.
    """
    inner = getattr(module, "_orig_mod", None)
    if inner is None and isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        inner = module.module
    return unwrapped(inner) if isinstance(inner, nn.Module) else module


def strip(weights: Unwrapped, module: nn.Module) -> Unwrapped:
    """The form of the tensors of which most names are those of the module: usual prefixes are taken
    away, and what stands in place of a weight (see `effective`) becomes the weight."""
    names = set(module.state_dict())
    forms = stripped_forms(weights, _transposed(module))
    return max(forms, key=lambda form: len(names & form.tensors.keys()))


def stripped_forms(weights: Unwrapped, transposed: Collection[str] = ()) -> list[Unwrapped]:
    """The tensors as they are, then with one usual prefix after the other taken away, and each of
    these with the weights that the model computes with, where others are kept.

    Args:
        transposed: names of weights of transposed convolutions.
    """
    forms, steps = [weights], list(weights.steps)
    tensors = weights.tensors
    if _AVERAGED_COUNT in tensors and all(k.startswith("module.") for k in _counted(tensors)):
        steps.append("took the averaged weights")
        tensors = {k.removeprefix("module."): v for k, v in _counted(tensors).items()}
        forms.append(Unwrapped(tensors, tuple(steps)))
    while (common := _common(tensors)) is not None:
        tensors = _without(tensors, common, steps)
        forms.append(Unwrapped(tensors, tuple(steps)))
    for change in (unwrapped_names, without_parallel, partial(effective, transposed=transposed)):
        changed = [(form, *change(form.tensors)) for form in forms]
        forms += [Unwrapped(new, (*form.steps, *done)) for form, new, done in changed if done]
    return forms


def _transposed(module: nn.Module) -> set[str]:
    kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    return {f"{n}.weight".lstrip(".") for n, m in module.named_modules() if isinstance(m, kinds)}


def _counted(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != _AVERAGED_COUNT}


def _dig(content: Any, ema: bool | None, steps: list[str], depth: int) -> Any:
    if not isinstance(content, Mapping) or not depth:
        return content
    orders: dict[bool | None, Sequence[str]] = {
        True: AVERAGED,
        False: PLAIN,
        None: (*PLAIN, *AVERAGED),
    }
    for name in orders[ema]:
        inner = content.get(name)
        if _holds_more(inner, len(_tensors(content))):
            steps.append(f"took {name!r}")
            return _dig(inner, ema if name in PLAIN else None, steps, depth - 1)
    return content


def _holds_more(inner: Any, than: int) -> bool:
    """Whether there are more tensors inside than beside it (a loss, a running mean)."""
    return any(len(_tensors(value)) > than for value in nested(inner))


def nested(content: Any) -> Iterator[Any]:
    """A mapping and all that is in it, at any depth; each object once, as it may hold itself."""
    reached, seen = [content], {id(content)}
    for value in reached:
        yield value
        for inner in value.values() if isinstance(value, Mapping) else ():
            if id(inner) not in seen:
                reached.append(inner)
                seen.add(id(inner))


def _at(content: Any, key: str, steps: list[str]) -> Any:
    inner = content
    for part in [key] if isinstance(content, Mapping) and key in content else key.split("."):
        if not isinstance(inner, Mapping) or part not in inner:
            raise LoadError(f"--key {key!r}: there is no {part!r}", f"there is {_describe(inner)}")
        inner = inner[part]
    steps.append(f"took {key!r}")
    return inner


def _tensors(content: Any) -> dict[str, Tensor]:
    """The tensors of a module or mapping; other things beside them (an epoch) do not matter."""
    if isinstance(content, nn.Module):
        content = content.state_dict()
    if not isinstance(content, Mapping):
        return {}
    return {str(k): v.data for k, v in content.items() if isinstance(v, Tensor)}


def _common(tensors: Mapping[str, Tensor]) -> str | None:
    for prefix in PREFIXES:
        if sum(name.startswith(prefix) for name in tensors) >= _MOST * len(tensors):
            return prefix
    return None


def _without(tensors: Mapping[str, Tensor], prefix: str, steps: list[str]) -> dict[str, Tensor]:
    kept = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    others = len(tensors) - len(kept)
    if not kept:
        raise LoadError(
            f"--strip-prefix {prefix!r}: no name begins with it",
            f"names: {', '.join([*tensors][:3])}",
        )
    steps.append(f"stripped {prefix!r}" + (f", leaving {others} others out" if others else ""))
    return kept


def _describe(content: Any) -> str:
    if isinstance(content, Mapping):
        return f"keys {', '.join(map(_label, [*content][:8]))}" if content else "nothing"
    return f"a {type(content).__name__}"


def _label(key: object) -> str:
    """A key of a checkpoint, which may be anything, in words."""
    return quoted(repr(key)) if isinstance(key, (str, int)) else f"a {type(key).__name__}"
