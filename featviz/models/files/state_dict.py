"""From what a training script saved to a plain state dict: nested keys and prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from featviz.errors import LoadError
from featviz.text import quoted

PLAIN = ("state_dict", "model_state_dict", "model", "net", "network", "module", "weights", "params")
AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema_model", "ema", "params_ema")
"""Keys under which checkpoints keep weights; the second are exponential moving averages."""

PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.", "encoder.", "backbone.")
"""What DataParallel, torch.compile, Lightning and training scripts put before names."""

_MOST = 0.9
"""A prefix counts if so many of the keys have it: losses and metrics may stand beside the model."""

_DEEPEST = 4


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
        raise LoadError(
            f"{name} holds no weights{f' under {key!r}' if key else ''}: {_describe(content)}",
            "--key says where they are, for example --key state_dict",
        )
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


def strip(weights: Unwrapped, wanted: Iterable[str]) -> Unwrapped:
    """Take usual prefixes away as long as that makes more names fit those that are wanted."""
    names = set(wanted)
    return max(stripped_forms(weights), key=lambda form: len(names & form.tensors.keys()))


def stripped_forms(weights: Unwrapped) -> list[Unwrapped]:
    """The tensors as they are, then with one usual prefix after the other taken away."""
    forms, steps = [weights], list(weights.steps)
    while (common := _common(forms[-1].tensors)) is not None:
        tensors = _without(forms[-1].tensors, common, steps)
        forms.append(Unwrapped(tensors, tuple(steps)))
    return forms


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
