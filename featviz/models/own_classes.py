"""Weights of one's own classes: which class of the code nearby they belong to, and with which
arguments a Lightning checkpoint says it was made."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from featviz.errors import LoadError
from featviz.models import outline
from featviz.models.outline import ModuleMaker
from featviz.text import listed, quoted

log = logging.getLogger(__name__)

HPARAMS = "hyper_parameters"
"""Where Lightning keeps the arguments of a class that called save_hyperparameters()."""

_NAME = "hparams_name"
"""Where Lightning keeps the name of the argument, if the class takes all of them as one."""

_LIGHTNING = "pytorch-lightning_version"
_SHOWN = 8


def read_hparams(content: Any, file: str) -> dict[str, Any]:
    """The hyper_parameters of a Lightning checkpoint, by name.

    Raises:
        LoadError: it has none.
    """
    hparams = content.get(HPARAMS) if isinstance(content, Mapping) else None
    if not isinstance(hparams, Mapping) or not hparams:
        raise LoadError(
            f"--model-arg @hparams: {file} has no {HPARAMS}",
            "give the arguments: --model-arg NAME=VALUE, repeatable",
        )
    named = {str(name): value for name, value in hparams.items()}
    name = content.get(_NAME)
    return {name: named} if isinstance(name, str) and name not in ("", "kwargs") else named


def taken(target: Callable[..., Any], hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the hyper_parameters that a class or function takes, as Lightning itself chooses
    them; says which it does not take."""
    parameters = inspect.signature(target).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(hparams)
    names = {parameter.name for parameter in parameters}
    if others := [quoted(name) for name in hparams if name not in names]:
        log.info("hyper_parameters that the model does not take: %s", listed(others, _SHOWN))
    return {name: value for name, value in hparams.items() if name in names}


def unknown_weights(path: Path, content: Any, forms: Iterable[Iterable[str]]) -> LoadError | None:
    """The error for weights of a class of one's own, with the class that they seem to belong to:
    the one of the current folder or the file's folder whose attributes have the names of the
    tensors.

    Args:
        content: what the file holds.
        forms: names of its tensors, with and without prefixes.

    Returns:
        None where it is no Lightning checkpoint, and no class is seen that fits.
    """
    mapping = content if isinstance(content, Mapping) else {}
    hparams = mapping.get(HPARAMS)
    names = [str(name) for name in hparams] if isinstance(hparams, Mapping) else []
    tops = [{key.partition(".")[0] for key in keys} for keys in forms]
    fitting = _fitting(tops, set(names), path.parent)
    if not fitting and _LIGHTNING not in mapping and not names:
        return None
    kind = "a Lightning checkpoint" if _LIGHTNING in mapping or names else "a file of weights"
    shown = listed([quoted(name) for name in names], _SHOWN)
    message = f"{path.name} is {kind}, and does not say of which class" + (
        f"; it has {HPARAMS}: {shown}" if names else ""
    )
    if not fitting:
        more = " --model-arg @hparams" if names else ""
        return LoadError(message, f"name the class: --arch net.py:CLASS{more}")
    maker = fitting[0][1]
    passed = ("--model-arg", "@hparams") if set(names) & {*maker.takes} else ()
    add = ("--arch", f"{fitting[0][0]}:{maker.name}", *passed)
    seen = listed([f"{file}:{maker.name}" for file, maker in fitting], _SHOWN)
    hint = f"its tensors have names as in {seen}; {' '.join(add)} takes it"
    return LoadError(message, hint, add=add)


def _fitting(
    tops: Sequence[set[str]], hparams: set[str], folder: Path
) -> list[tuple[Path, ModuleMaker]]:
    """The classes that set all attributes at which tensors are; those first that take most of the
    hyper_parameters."""
    fitting = [
        (path, maker)
        for path, maker in outline.models_in([Path(), folder])
        if any(names <= maker.parts for names in tops)
    ]
    return sorted(fitting, key=lambda f: -len(hparams & {*f[1].takes}))
