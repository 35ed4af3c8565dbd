"""What a caller has in memory, lent to the stories of the commands, and given back as it was."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import nn

from featviz.api.keywords import names_of
from featviz.errors import UsageError
from featviz.images import memory
from featviz.models.arguments import UserTransform
from featviz.models.load import LoadedModel, adopt, fed, load_model
from featviz.options import HPARAMS, InputOptions, ModelOptions, declared, no_option, read, take


class Room:
    """A temporary folder, which is removed when the last object that needs it is gone."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="featviz-"))
        self._end = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True)
class Feeding:
    """How the caller's own code feeds a model."""

    transform: UserTransform | None = None
    further: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def taken(cls, options: dict[str, Any]) -> Feeding:
        """Take `transform` and `forward_args` out of the keywords; the name of a transform stays.

        Raises:
            UsageError: one is something else.
        """
        transform, further = options.get("transform"), options.pop("forward_args", None) or {}
        if transform is None or callable(transform):
            options.pop("transform", None)
        if not isinstance(further, Mapping):
            raise UsageError(f"forward_args is {type(further).__name__!r}", "{'t': 10}")
        return cls(UserTransform.of(transform) if callable(transform) else None, further)


@contextmanager
def lent(
    model: Any, for_model: Mapping[str, Any], inputs: InputOptions, feeding: Feeding
) -> Iterator[ModelOptions | LoadedModel]:
    """A model as the stories take it; it is given back as it was."""
    source = source_of(model, for_model, inputs)
    if feeding == Feeding():
        yield source
        return
    with fed(load_model(source, inputs), inputs, feeding.transform, feeding.further) as loaded:
        yield loaded


@contextmanager
def loading(
    model: Any, options: dict[str, Any], *kinds: type[Struct]
) -> Iterator[tuple[ModelOptions | LoadedModel, InputOptions]]:
    """A model and the options of its input, from keywords.

    Args:
        kinds: the records of the other keywords of the function, for messages.

    Raises:
        UsageError: a keyword that does not exist, or a bad value.
    """
    feeding = Feeding.taken(options)
    for_model, for_input = take_model(options), take(InputOptions, options)
    if options:
        raise no_option(options, names_of(ModelOptions, InputOptions, *kinds))
    inputs = read(InputOptions, for_input)
    with lent(model, for_model, inputs, feeding) as source:
        yield source, inputs


def take_model(options: dict[str, Any], but: Collection[str] = ()) -> dict[str, Any]:
    """The keywords that say how a MODEL string is loaded; they are removed."""
    hparams = {"hparams": options.pop("hparams")} if "hparams" in options else {}
    taken = take(ModelOptions, options, but)
    if "model_args" in taken:
        taken["model_args"] = dict(declared(ModelOptions)["model_args"].value(taken["model_args"]))
        hparams |= {"hparams": True} if taken["model_args"].pop(HPARAMS, None) else {}
    return {**taken, **hparams}


def source_of(
    model: Any, for_model: Mapping[str, Any], inputs: InputOptions
) -> ModelOptions | LoadedModel:
    """A MODEL string with its options, or a module that is there.

    Raises:
        UsageError: it is neither, or options of a MODEL string are given with a module.
    """
    if isinstance(model, nn.Module):
        if for_model:
            raise UsageError(f"{', '.join(for_model)} is for a MODEL string, and this is a module")
        check_module(model)
        return adopt(model, inputs)
    if not isinstance(model, (str, Path)):
        raise UsageError(
            f"the model is {type(model).__name__!r}, and neither a MODEL string nor a module",
            "of an exported program, torch.export.unflatten makes a module",
        )
    options = dict(for_model)
    if isinstance(options.get("device"), torch.device):
        options["device"] = str(options["device"])
    return read(ModelOptions, {"spec": str(model), **options})


def check_module(model: Any) -> None:
    """Refuse what takes no hooks.

    Raises:
        UsageError: it is TorchScript, or no module.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "the model is TorchScript, which takes no hooks on its layers",
            "give the module that it was made from, or export that with torch.export (.pt2)",
        )
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is {type(model).__name__!r}, not a module", "an nn.Module")


@contextmanager
def as_files(images: Any) -> Iterator[list[str]]:
    """Paths as they are, and images in memory as files for a while.

    Raises:
        UsageError: there are none, or something is no image.
    """
    if not (pictures := several(images)):
        raise UsageError("there are no images", "give paths or images")
    room = Room()
    inside = room.path / "in-memory"
    inside.mkdir()
    yield memory.to_files(pictures, inside)


def selectors(layers: Any) -> str | None:
    """Selectors as text.

    Raises:
        UsageError: a layer is neither text nor a class of modules.
    """
    if layers is None:
        return None
    return ",".join(map(_selector, several(layers)))


def _selector(layer: Any) -> str:
    if isinstance(layer, type) and issubclass(layer, nn.Module):
        return layer.__name__
    if isinstance(layer, str):
        return layer
    raise UsageError(
        f"layers has a {type(layer).__name__!r}, which is neither text nor a class of modules",
        "for example 'Conv2d,layer1.*', torch.nn.Conv2d, or a list of these",
    )


def several(values: Any) -> Sequence[Any]:
    """A list or tuple as it is; anything else is one."""
    return values if isinstance(values, (list, tuple)) else [values]
