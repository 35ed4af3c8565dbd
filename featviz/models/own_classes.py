"""Weights of one's own classes: which class of the code nearby they belong to, and with which
arguments a Lightning checkpoint says it was made."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    fitting = _nearby(path, set(names), forms)
    if fitting is None and _LIGHTNING not in mapping and not names:
        return None
    kind = "a Lightning checkpoint" if _LIGHTNING in mapping or names else "a file of weights"
    shown = listed([quoted(name) for name in names], _SHOWN)
    message = f"{path.name} is {kind}, and does not say of which class" + (
        f"; it has {HPARAMS}: {shown}" if names else ""
    )
    if fitting is None:
        more = " --model-arg @hparams" if names else ""
        return LoadError(message, f"name the class: --arch net.py:CLASS{more}")
    return LoadError(message, fitting.words, add=fitting.add)


@dataclass(frozen=True)
class Nearby:
    """The classes of the code nearby that weights may belong to."""

    names: tuple[str, ...]
    """As `--arch` takes them, `net.py:Net`, the likeliest first."""
    add: tuple[str, ...]
    """The options with which the file is loaded into the first."""

    @property
    def words(self) -> str:
        """For people."""
        seen = listed(self.names, _SHOWN)
        return f"its tensors have names as in {seen}; {' '.join(self.add)} takes it"


def nearby(path: Path, content: Any, forms: Iterable[Iterable[str]]) -> Nearby | None:
    """The classes in the current folder or the file's folder whose attributes have the names of the
    tensors; None where there is none.

    Args:
        content, forms: as for `unknown_weights`.
    """
    hparams = content.get(HPARAMS) if isinstance(content, Mapping) else None
    return _nearby(path, {*map(str, hparams)} if isinstance(hparams, Mapping) else set(), forms)


def _nearby(path: Path, hparams: set[str], forms: Iterable[Iterable[str]]) -> Nearby | None:
    tops = [{key.partition(".")[0] for key in keys} for keys in forms]
    fitting = _fitting(tops, hparams, path.parent)
    if not fitting:
        return None
    names = tuple(f"{file}:{maker.name}" for file, maker in fitting)
    passed = ("--model-arg", "@hparams") if hparams & {*fitting[0][1].takes} else ()
    return Nearby(names, ("--arch", names[0], *passed))


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
