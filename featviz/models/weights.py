"""Weights: from what a training script saved to tensors by name, and from these into a module."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from featviz.errors import LoadError
from featviz.models import checkpoint
from featviz.models.torch_files import nested
from featviz.options import ModelOptions
from featviz.text import listed, quoted

log = logging.getLogger(__name__)

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

_MOST = 0.8
"""A prefix counts if so many of the keys have it: losses and metrics may stand beside the model."""

_WRAPPERS = (
    re.compile(r"_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\."),
    re.compile(r"(?<=\.)module\."),
)
"""What torch.compile, FSDP and activation checkpointing put into the names of a part; and
DataParallel, which may also be a module's own name."""

_DEEPEST = 4

_SHOWN = 4


@dataclass(frozen=True)
class Unwrapped:
    """Tensors by name, and what was done to find them, in words."""

    tensors: dict[str, Tensor]
    steps: tuple[str, ...] = ()
    module: nn.Module | None = None


def read_weights(path: Path, options: ModelOptions) -> Unwrapped:
    """The tensors of a file by name."""
    content = checkpoint.read(path, options.trust)
    return unwrap(content, options.key, options.strip_prefix, options.ema, path.name)


def unwrap(
    content: Any,
    key: str | None = None,
    prefix: str | None = None,
    ema: bool | None = None,
    name: str = "the checkpoint",
) -> Unwrapped:
    """Find the state dict in a checkpoint: under `key` (`state_dict`, `models.generator`), else in
    the usual places; averaged weights (`ema`), plain ones (False), or plain ones if there are any
    (None). A `prefix` is stripped from names."""
    steps: list[str] = []
    inner = content
    if key:
        there = isinstance(content, Mapping) and key in content
        for part in [key] if there else key.split("."):
            if not isinstance(inner, Mapping) or part not in inner:
                message = f"--key {key!r}: there is no {part!r}"
                raise LoadError(message, f"there is {_describe(inner)}")
            inner = inner[part]
        steps.append(f"took {key!r}")
    else:
        inner = _dig(content, ema, steps)
    tensors = _tensors(inner)
    if not tensors:
        what = "averaged weights (--ema)" if ema and not key else "weights"
        under = f" under {key!r}" if key else ""
        hint = "leave out --ema for the plain ones" if ema else "--key says where they are"
        raise LoadError(f"{name} holds no {what}{under}: {_describe(content)}", hint)
    found = Unwrapped(tensors, tuple(steps), inner if isinstance(inner, nn.Module) else None)
    return _without(found, prefix) if prefix else found


def _dig(content: Any, ema: bool | None, steps: list[str], depth: int = _DEEPEST) -> Any:
    """What lies under the first usual key with more tensors than lie beside it."""
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


def _tensors(content: Any) -> dict[str, Tensor]:
    """The tensors of a module or mapping; other things beside them (an epoch) do not matter."""
    if isinstance(content, nn.Module):
        content = content.state_dict()
    if not isinstance(content, Mapping):
        return {}
    return {str(k): v.data for k, v in content.items() if isinstance(v, Tensor)}


def _describe(content: Any) -> str:
    if not isinstance(content, Mapping):
        return f"a {type(content).__name__}"
    keys = [
        quoted(repr(key)) if isinstance(key, (str, int)) else f"a {type(key).__name__}"
        for key in [*content][:8]
    ]
    return f"keys {', '.join(keys)}" if keys else "nothing"


def _without(weights: Unwrapped, prefix: str) -> Unwrapped:
    """The tensors whose names begin with a prefix, without it."""
    tensors = weights.tensors
    kept = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    if not kept:
        message = f"--strip-prefix {prefix!r}: no name begins with it"
        raise LoadError(message, f"names: {', '.join([*tensors][:3])}")
    others = len(tensors) - len(kept)
    step = f"stripped {prefix!r}" + (f", leaving {others} others out" if others else "")
    return Unwrapped(kept, (*weights.steps, step), weights.module)


def stripped_forms(weights: Unwrapped) -> list[Unwrapped]:
    """The tensors as they are, then with one usual prefix after the other taken away, and each of
    these without wrappers of parts."""
    form, forms = weights, [weights]
    while True:
        names, most = [*form.tensors], _MOST * len(form.tensors)
        common = [p for p in _PREFIXES if sum(name.startswith(p) for name in names) >= most]
        if not common:
            break
        form = _without(form, common[0])
        forms.append(form)
    for wrapper in _WRAPPERS:
        for form in [*forms]:
            found = sorted({part for name in form.tensors for part in wrapper.findall(name)})
            renamed = {wrapper.sub("", name): tensor for name, tensor in form.tensors.items()}
            if found and len(renamed) == len(form.tensors):  # else two names became one
                step = f"took {', '.join(map(repr, found))} out of names"
                forms.append(Unwrapped(renamed, (*form.steps, step)))
    return forms


def put_weights(
    module: nn.Module, tensors: Unwrapped, path: Path, options: ModelOptions
) -> dict[str, Any]:
    """Load the tensors of a file into a module; returns what run.json says of them."""
    names = set(module.state_dict())
    fitting = max(stripped_forms(tensors), key=lambda form: len(names & form.tensors.keys()))
    if fitting.steps:
        log.info("%s: %s", path.name, "; ".join(fitting.steps))
    what = f"{path.name} does not fit {options.spec}"
    loaded = put_into(module, fitting.tensors, what, options.partial)
    return {**checkpoint.record(path), "taken": [*fitting.steps, loaded]}


def put_into(
    module: nn.Module, tensors: Mapping[str, Tensor], what: str, partial: bool = False
) -> str:
    """Load tensors into a module, cast to its own precision; returns how many of its tensors there
    were. `what` begins the message, `net.pth does not fit resnet18`; `partial` loads what fits."""
    own = module.state_dict()
    expected = {k: v for k, v in own.items() if isinstance(v, Tensor)}
    # BatchNorm's step counter: old checkpoints lack it, and nothing depends on it here
    total = [k for k in expected if k in tensors or not k.endswith("num_batches_tracked")]
    chosen = OrderedDict(
        (k, v) for k, v in tensors.items() if k in expected and expected[k].shape == v.shape
    )
    odd = {
        "missing ": [quoted(key) for key in total if key not in tensors],
        "unexpected ": [quoted(key) for key in tensors if key not in expected],
        "": [
            f"{quoted(key)} is {list(tensors[key].shape)}, not {list(expected[key].shape)}"
            for key in total
            if key in tensors and key not in chosen
        ],
    }
    words = "; ".join(word + listed(keys, _SHOWN) for word, keys in odd.items() if keys)
    if words and not (partial and chosen):
        raise LoadError(
            f"{what}: {len(chosen)} of {len(total)} tensors; {words}",
            "another --arch, --model-arg (for example num_classes=10), or --partial for what fits",
        )
    # MNASNet loads no unknown version
    vars(chosen)["_metadata"] = getattr(own, "_metadata", {})
    try:
        module.load_state_dict(chosen, strict=False)
    except (RuntimeError, KeyError) as error:  # of sparse and quantised tensors and modules
        raise LoadError(
            f"{what}: {quoted(str(error).strip().splitlines()[-1].strip())}",
            "save the weights as plain dense tensors",
        ) from error
    loaded = f"loaded {len(chosen)} of {len(total)}"
    if words:
        log.warning("%s tensors (--partial): %s", loaded, words)
    return loaded


def in_full_precision(module: nn.Module, device: torch.device) -> nn.Module:
    """Half and bfloat16 become float32 on a CPU, where many operations lack them."""
    halves = (torch.float16, torch.bfloat16)
    tensors = [*module.parameters(), *module.buffers()]
    if device.type == "cpu" and any(tensor.dtype in halves for tensor in tensors):
        log.info("half precision is cast to float32 on the CPU")
        return module.float()
    return module
