"""Whether a model is a classifier, by what it says it is, and how its classes are called."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from featviz.models.hf.seeing import ImageTower
from featviz.text import printable


def scores(module: nn.Module) -> str | None:
    """Where the scores of classes are in a model's output: a key, empty for the output itself, or
    None where the model says that it is no classifier.

    Models of transformers say it by their class, those of timm by `num_classes`; others say
    nothing, and are taken for classifiers.
    """
    if _is_of_transformers(module):
        return "logits" if "ForImageClassification" in type(module).__name__ else None
    return None if getattr(module, "num_classes", None) == 0 else ""


def names(module: nn.Module) -> tuple[str, ...]:
    """The names of the classes by number, where a model of transformers has one for each."""
    if not _is_of_transformers(module) or scores(module) is None:
        return ()
    labels = getattr(module.config, "id2label", None)
    if not isinstance(labels, Mapping) or set(labels) != set(range(len(labels))):
        return ()
    return tuple(printable(str(labels[number])) for number in range(len(labels)))


def _is_of_transformers(module: nn.Module) -> bool:
    """Also of one that somebody derived from a class of theirs."""
    kinds = type(module).__mro__
    return isinstance(module, ImageTower) or any(
        kind.__module__.startswith("transformers.") for kind in kinds
    )
