"""Whether a model is a classifier, by what it says it is, and how its classes are called."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from featviz.models.hf.seeing import ImageTower
from featviz.text import printable


def scores(module: nn.Module) -> str | None:
    """Where the scores of classes are in a model's output: a key, empty for the output itself, or
    None where the model says that it is no classifier.

    Models of transformers say it by their class, also where they were exported, those of
    Ultralytics by theirs, those of timm by `num_classes`; others say nothing, and are taken for
    classifiers.
    """
    if _is_of_ultralytics(module):
        return "1" if type(module).__name__ == "ClassificationModel" else None  # (shares, scores)
    if _is_of_transformers(module):
        return "logits" if "ForImageClassification" in _class_name(module) else None
    return None if getattr(module, "num_classes", None) == 0 else ""


def names(module: nn.Module) -> tuple[str, ...]:
    """The names of the classes by number, where a classifier of transformers or Ultralytics has one
    for each."""
    if scores(module) is None:
        return ()
    labels = None
    if _is_of_ultralytics(module):
        labels = getattr(module, "names", None)
    elif _is_of_transformers(module):
        labels = getattr(getattr(module, "config", None), "id2label", None)
    if not isinstance(labels, Mapping) or set(labels) != set(range(len(labels))):
        return ()
    return tuple(printable(str(labels[number])) for number in range(len(labels)))


def _is_of_ultralytics(module: nn.Module) -> bool:
    return type(module).__module__.startswith("ultralytics.")


def _is_of_transformers(module: nn.Module) -> bool:
    """Also of one that somebody derived from a class of theirs."""
    homes = [_class_name(module), *(kind.__module__ for kind in type(module).__mro__)]
    return isinstance(module, ImageTower) or any(h.startswith("transformers.") for h in homes)


def _class_name(module: nn.Module) -> str:
    """The full name of a module's class, or of the one that an exported module stands for."""
    kind = type(module)
    original = getattr(module, "type_name", None)
    if kind.__module__ == "torch.export.unflatten" and original is not None:
        return str(original() or "")
    return f"{kind.__module__}.{kind.__qualname__}"
