"""From what a training script saved to a plain state dict: nested keys, prefixes, and what pruning
and wrappers keep in place of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from featviz.errors import LoadError
from featviz.text import counted, quoted

_PLAIN = (
    "state_dict",
    "model_state_dict",
    "model",
    "net",
    "network",
    "module",
    "weights",
    "params",
)
_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema_model", "ema", "params_ema")
"""Keys under which checkpoints keep weights; the second are exponential moving averages."""

_PREFIXES = (
    *("module.", "_orig_mod.", "model.", "net.", "network.", "encoder.", "backbone."),
    "timm_model.",
)
"""What DataParallel, torch.compile, Lightning, training scripts and transformers around a model of
timm's put before names."""

_AVERAGED_COUNT = "n_averaged"
"""What AveragedModel (SWA, EMA) keeps beside the weights."""

_MOST = 0.9
"""A prefix counts if so many of the keys have it: losses and metrics may stand beside the model."""

_WRAPPERS = {
    "_orig_mod.": "",
    "_fsdp_wrapped_module.": "",
    "_checkpoint_wrapped_module.": "",
}
"""What torch.compile, FSDP and activation checkpointing put into the names of a part, and what
stands in its place."""
_PARALLEL = {".module.": "."}
"""The same of DataParallel; it may be a module's own name."""

_DEEPEST = 4
"""Mappings inside one another that are looked into."""


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
    tensors = _tensors(inner)
    if not tensors:
        what = "averaged weights (--ema)" if ema and not key else "weights"
        under = f" under {key!r}" if key else ""
        hint = "leave out --ema for the plain ones" if ema else "--key says where they are"
        raise LoadError(f"{name} holds no {what}{under}: {_describe(content)}", hint)
    if prefix:
        tensors = _without(tensors, prefix, steps)
    return Unwrapped(tensors, tuple(steps), inner if isinstance(inner, nn.Module) else None)


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
    away, and pruned weights are multiplied by their masks."""
    names = set(module.state_dict())
    forms = stripped_forms(weights)
    return max(forms, key=lambda form: len(names & form.tensors.keys()))


def stripped_forms(weights: Unwrapped) -> list[Unwrapped]:
    """The tensors as they are, then with one usual prefix after the other taken away, and each of
    these without wrappers of parts and without masks of pruning."""
    forms, steps = [weights], list(weights.steps)
    tensors = weights.tensors
    others = {name: tensor for name, tensor in tensors.items() if name != _AVERAGED_COUNT}
    if len(others) < len(tensors) and all(name.startswith("module.") for name in others):
        steps.append("took the averaged weights")
        tensors = {name.removeprefix("module."): tensor for name, tensor in others.items()}
        forms.append(Unwrapped(tensors, tuple(steps)))
    while True:
        most = _MOST * len(tensors)
        common = [p for p in _PREFIXES if sum(name.startswith(p) for name in tensors) >= most]
        if not common:
            break
        tensors = _without(tensors, common[0], steps)
        forms.append(Unwrapped(tensors, tuple(steps)))
    parallel = partial(_unwrapped_names, wrappers=_PARALLEL)
    for change in (_unwrapped_names, parallel, _unpruned):
        changed = [(form, *change(form.tensors)) for form in forms]
        forms += [Unwrapped(new, (*form.steps, *done)) for form, new, done in changed if done]
    return forms


def _unwrapped_names(
    tensors: Mapping[str, Tensor], wrappers: Mapping[str, str] = _WRAPPERS
) -> tuple[dict[str, Tensor], list[str]]:
    """Names without the wrappers of parts of the model, unless two names become one; also returns
    what was done, in words."""
    renamed, steps = dict(tensors), []
    for part, by in wrappers.items():
        if any(part in name for name in renamed):
            renamed = {name.replace(part, by): tensor for name, tensor in renamed.items()}
            steps.append(f"took {part.removeprefix('.')!r} out of names")
    return (renamed, steps) if len(renamed) == len(tensors) else (dict(tensors), [])


def _unpruned(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Weights that `torch.nn.utils.prune` keeps as `NAME_orig` and `NAME_mask`, multiplied; also
    returns what was done. Those whose shapes differ stay as they are."""
    plain, count = dict(tensors), 0
    for name, mask in tensors.items():
        weight = tensors.get(f"{name.removesuffix('_mask')}_orig")
        if name.endswith("_mask") and weight is not None and weight.shape == mask.shape:
            name = name.removesuffix("_mask")
            del plain[f"{name}_orig"], plain[f"{name}_mask"]
            plain[name] = weight * mask.to(weight.dtype)
            count += 1
    done = f"multiplied {counted(count, 'weight')} by the masks of pruning"
    return plain, [done] if count else []


def _dig(content: Any, ema: bool | None, steps: list[str], depth: int) -> Any:
    if not isinstance(content, Mapping) or not depth:
        return content
    places = {True: _AVERAGED, False: _PLAIN, None: (*_PLAIN, *_AVERAGED)}
    beside = len(_tensors(content))  # a loss, a running mean
    for name in places[ema]:
        inner = content.get(name)
        if any(len(_tensors(value)) > beside for value in nested(inner)):
            steps.append(f"took {name!r}")
            return _dig(inner, ema if name in _PLAIN else None, steps, depth - 1)
    return content


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


def _without(tensors: Mapping[str, Tensor], prefix: str, steps: list[str]) -> dict[str, Tensor]:
    kept = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    others = len(tensors) - len(kept)
    if not kept:
        message = f"--strip-prefix {prefix!r}: no name begins with it"
        raise LoadError(message, f"names: {', '.join([*tensors][:3])}")
    steps.append(f"stripped {prefix!r}" + (f", leaving {others} others out" if others else ""))
    return kept


def _describe(content: Any) -> str:
    """What there is in place of weights; keys may be anything."""
    if not isinstance(content, Mapping):
        return f"a {type(content).__name__}"
    keys = [
        quoted(repr(key)) if isinstance(key, (str, int)) else f"a {type(key).__name__}"
        for key in [*content][:8]
    ]
    return f"keys {', '.join(keys)}" if keys else "nothing"
