"""torchvision's models by name."""

from __future__ import annotations

import difflib
import logging
import pickle
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlparse

import torch
from torch import nn

from featviz.errors import FeatvizError, LoadError, UsageError
from featviz.models.requirements import require_torchvision
from featviz.models.sources import Loaded, ModelOptions
from featviz.models.weights import load_weights

log = logging.getLogger(__name__)


def load(options: ModelOptions) -> Loaded:
    """Build the model with the weights of torchvision, of a file, or random ones.

    Raises:
        UsageError: no such model or entry.
        LoadError: the weights cannot be had, or do not fit.
    """
    name = options.spec.removeprefix("torchvision:")
    weights = options.weights or "default"
    source = {"kind": "torchvision", "name": name}
    if Path(weights).is_file():
        module, entry = build(name, None, options.seed, options.model_args)
        return Loaded(module, entry, {**source, **load_weights(module, Path(weights), options)})
    module, entry = build(name, weights, options.seed, options.model_args)
    seed = {"seed": options.seed} if weights == "none" else {}
    return Loaded(module, entry, {**source, "weights": weights, **seed})


def build(
    name: str, weights: str | None, seed: int, arguments: Mapping[str, Any]
) -> tuple[nn.Module, Any]:
    """Build a torchvision model.

    Args:
        weights: `default`, an entry's name, `none` for random ones (with a warning), or None for
            random ones that the caller replaces.

    Returns:
        The module, and the weights entry whose transforms fit it (None where there is none).

    Raises:
        UsageError: no such model or entry.
        LoadError: the weights cannot be had, or the builder refuses its arguments.
    """
    check_name(name)
    entry = _entry(name, weights)
    chosen = entry if weights not in (None, "none") else None
    if weights == "none":
        log.warning("%s has random weights (--weights none, --seed %d)", name, seed)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return _build(name, chosen, arguments), entry


def check_name(name: str) -> None:
    """Raise UsageError with the nearest names where torchvision has no such model."""
    if name in _models().list_models():
        return
    close = difflib.get_close_matches(name.lower(), _models().list_models(), 3)
    raise UsageError(
        f"torchvision has no model {name!r}, and no file is called so",
        f"did you mean {', '.join(close)}?" if close else "a file, or a name such as resnet18",
        replace=(name, close[0]) if close else None,
    )


def _models() -> Any:
    """torchvision.models.

    Raises:
        UnfitError: torchvision does not fit torch.
    """
    require_torchvision()
    from torchvision import models

    return models


def _entry(name: str, weights: str | None) -> Any:
    entries = _models().get_model_weights(name)
    if weights in (None, "none", "default"):
        if weights == "default" and not len(entries):
            raise UsageError(f"torchvision has no weights for {name}", "--weights none, or a file")
        return getattr(entries, "DEFAULT", None)
    if str(weights) in entries.__members__:
        return entries[str(weights)]
    raise UsageError(
        f"--weights {weights!r} is neither a file nor an entry of {name}",
        f"one of default, none, {', '.join(entries.__members__)}",
    )


def _build(name: str, entry: Any, arguments: Mapping[str, Any]) -> nn.Module:
    quiet: dict[str, Any] = {"weights": entry, "progress": sys.stderr.isatty()}
    if entry is None and "weights_backbone" not in arguments and _has_backbone(name):
        quiet["weights_backbone"] = None
    try:
        with warnings.catch_warnings():
            # about how inception and googlenet initialise; nothing that a user here could act on
            warnings.simplefilter("ignore", FutureWarning)
            module: nn.Module = _models().get_model(name, **quiet, **arguments)
    except (URLError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise _not_downloaded(name, entry, error) from error
    except RuntimeError as error:
        if entry is None:
            raise
        raise _not_downloaded(name, entry, error) from error
    except (TypeError, ValueError) as error:
        raise LoadError(
            f"torchvision's {name} refused its arguments: {error}", "see --model-arg"
        ) from error
    return module


def _has_backbone(name: str) -> bool:
    import inspect

    return "weights_backbone" in inspect.signature(_models().get_model_builder(name)).parameters


def _not_downloaded(name: str, entry: Any, error: Exception) -> FeatvizError:
    if entry is None:
        return LoadError(f"torchvision's {name} could not be built: {error}")
    file = Path(urlparse(entry.url).path).name
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    return LoadError(
        f"the weights {entry} could not be loaded: {error}",
        f"put {file} into {folder}, or use --weights none for random ones",
    )
