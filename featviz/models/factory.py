"""`pkg.mod:factory` and `file.py:factory`: the user's own code that makes a model."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from featviz.errors import LoadError, UsageError
from featviz.models import checkpoint, code, digests
from featviz.models.sources import Loaded, source_of
from featviz.models.weights import put_weights, read_weights
from featviz.options import ModelOptions
from featviz.text import listed, quoted

log = logging.getLogger(__name__)

_HPARAMS = "hyper_parameters"
"""Where Lightning keeps the arguments of a class that called save_hyperparameters()."""


def load_factory(options: ModelOptions) -> Loaded:
    """Call the factory; give the model the weights of a file, if one is named."""
    path = None if options.weights in (None, "none") else Path(str(options.weights))
    if path is not None and not path.is_file():
        raise UsageError(f"no weights file {options.weights!r}", "a factory takes a file, or none")
    hparams: dict[str, Any] = {}
    if options.hparams:
        if path is None:
            message = "--model-arg @hparams needs a Lightning checkpoint"
            raise UsageError(message, "--weights FILE names it")
        hparams = _read_hparams(checkpoint.read(path, options.trust), path.name)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(options.seed)
        module = _built(options.spec, options.model_args, hparams)
    record: dict[str, Any] = {"seed": options.seed}
    if path is not None:
        record = put_weights(module, read_weights(path, options), path, options)
    if hparams:
        record[_HPARAMS] = {name: quoted(repr(value)) for name, value in hparams.items()}
    if (digest := code.digest(options.spec)) is not None:
        record["code_sha256"] = digest
    parameters = digests.of_module(module)
    if parameters is not None or path is None:  # else the file's sha256 tells it from others
        record["parameters"] = parameters
    name = source_of(options.spec).name(options.spec)
    return Loaded(module, None, {"kind": "factory", "name": name, **record})


def unknown_weights(file: str, content: Any) -> LoadError | None:
    """The error for a Lightning checkpoint without its class; None for any other file."""
    if not isinstance(content, Mapping) or not content.keys() & {
        _HPARAMS,
        "pytorch-lightning_version",
    }:
        return None
    found = content.get(_HPARAMS)
    names = [quoted(str(name)) for name in found] if isinstance(found, Mapping) else []
    has = f"; it has {_HPARAMS}: {listed(names, 8)}" if names else ""
    return LoadError(
        f"{file} is a Lightning checkpoint, and does not say of which class{has}",
        "name the class: --arch net.py:CLASS" + (" --model-arg @hparams" if names else ""),
    )


def _built(spec: str, arguments: Mapping[str, Any], hparams: Mapping[str, Any]) -> nn.Module:
    """The output of a function or class, or the module that is named."""
    named = code.target(spec)
    if isinstance(named, nn.Module):
        return named
    if not callable(named):
        raise LoadError(
            f"{spec} is a {type(named).__name__}, not a factory", "name a function or a class"
        )
    given = _given(named, spec.rpartition(":")[2], arguments, hparams)
    try:
        module = named(**given)
    except Exception as error:
        raise code.raised(f"{spec} raised", error) from error
    if not isinstance(module, nn.Module):
        raise LoadError(
            f"{spec} gave a {type(module).__name__}, not an nn.Module", "return the model"
        )
    return module


def _given(
    named: Callable[..., Any], name: str, arguments: Mapping[str, Any], hparams: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments that a function or class gets: all of the user's, and of the hyper_parameters
    those that it takes, as Lightning itself chooses them."""
    try:
        parameters = inspect.signature(named).parameters
    except (TypeError, ValueError):  # one that does not tell
        return {**hparams, **arguments}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return {**hparams, **arguments}
    if wrong := [argument for argument in arguments if argument not in parameters]:
        close = difflib.get_close_matches(wrong[0], parameters, 1)
        raise UsageError(
            f"--model-arg {quoted(wrong[0])}: {name} takes no such argument",
            f"did you mean {close[0]}?" if close else f"it takes {', '.join(parameters) or 'none'}",
        )
    if others := [quoted(argument) for argument in hparams if argument not in parameters]:
        log.info("hyper_parameters that the model does not take: %s", listed(others, 8))
    return {**{n: value for n, value in hparams.items() if n in parameters}, **arguments}


def _read_hparams(content: Any, file: str) -> dict[str, Any]:
    """The hyper_parameters of a Lightning checkpoint by name; under one name, where the class takes
    all of them as one argument."""
    found = content.get(_HPARAMS) if isinstance(content, Mapping) else None
    if not isinstance(found, Mapping) or not found:
        what = (
            f"{_HPARAMS} that are a {type(found).__name__}, no dict" if found else f"no {_HPARAMS}"
        )
        raise LoadError(
            f"--model-arg @hparams: {file} has {what}",
            "give the arguments: --model-arg NAME=VALUE, repeatable",
        )
    named = {str(key): value for key, value in found.items()}
    name = content.get("hparams_name")
    return {name: named} if isinstance(name, str) and name not in ("", "kwargs") else named
