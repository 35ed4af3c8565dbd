"""From a MODEL string to a module on its device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from featviz.errors import FeatvizError, UsageError
from featviz.models import arguments, classes, digests, requirements
from featviz.models.devices import pick_device
from featviz.models.files.state_dict import unwrapped
from featviz.models.preprocess import InputOptions, Preprocess
from featviz.models.presets import choose_preprocess
from featviz.models.sources import Loaded, ModelOptions, check_source, load_source
from featviz.models.transform import UserTransform, by_function, by_transform
from featviz.models.weights import check_values, in_full_precision
from featviz.records.checking import check

__all__ = [
    "Loaded",
    "LoadedModel",
    "ModelOptions",
    "adopt",
    "fed",
    "load_model",
    "mistakes_first",
    "pick_device",
]


@dataclass(frozen=True)
class LoadedModel:
    """A module on its device, and how to feed it."""

    module: nn.Module
    preprocess: Preprocess
    device: torch.device
    source: Mapping[str, Any]
    """The model for run.json: its kind, name or file, and weights; no absolute path."""
    categories: tuple[str, ...] = ()
    """Names of the classes, where the weights have them."""
    scores: str | None = ""
    """Where in the output the scores of classes are: a key, empty for the output itself, or None
    where the model is no classifier."""


@requirements.fitting()
def load_model(options: ModelOptions | LoadedModel, inputs: InputOptions) -> LoadedModel:
    """Load a model, ready to be run; one that is loaded stays as it is.

    Raises:
        UsageError: no such name, file or device, or a bad option.
        LoadError: there is something, but no model can be made of it.
        UnfitError: it needs torchvision, which does not fit torch.
    """
    check(inputs)
    if isinstance(options, LoadedModel):
        return options
    check(options)
    device = pick_device(options.device)
    loaded = load_source(options)
    check_values(loaded.module)
    module = in_full_precision(unwrapped(loaded.module), device).to(device)
    if inputs.transform is not None:
        preprocess = by_transform(inputs.transform, inputs, module)
    else:
        preprocess = choose_preprocess(module, loaded.entry, inputs, loaded.fixed)
    if inputs.input:
        further = arguments.parse(inputs.input)
        taken = getattr(preprocess.transform, "names", ())
        arguments.bind(module, further, taken, device)
        preprocess = replace(preprocess, further=tuple(one.words for one in further))
    built_with = {name: repr(value) for name, value in options.model_args.items()}
    source = {**loaded.source, **({"arguments": built_with} if built_with else {})}
    named = classes.names(module) or _categories(loaded)
    return LoadedModel(module, preprocess, device, source, named, classes.scores(module))


@contextmanager
def mistakes_first(model: ModelOptions | LoadedModel) -> Iterator[None]:
    """A block in which a place to write is refused before the model is loaded: a mistake in how
    the model is named is said in place of the refusal. Only then is it looked for.

    Raises:
        UsageError: no such name, file, device or argument.
        LoadError: a package is missing.
    """
    try:
        yield
    except FeatvizError:
        if isinstance(model, ModelOptions):
            check(model)
            pick_device(model.device)
            check_source(model)
        raise


def _categories(loaded: Loaded) -> tuple[str, ...]:
    """torchvision's names of the classes; random weights have none."""
    if loaded.entry is None or loaded.source.get("weights") == "none":
        return ()
    return tuple(getattr(loaded.entry, "meta", {}).get("categories", ()))


def adopt(module: nn.Module, inputs: InputOptions) -> LoadedModel:
    """Take a module that the caller already has, where it is.

    A compiled one (which ignores hooks that come later) and one in DataParallel or
    DistributedDataParallel are taken out of their wrapping.

    Raises:
        UsageError: a transform or further arguments are named, which change how the module is
            called.
    """
    if inputs.transform is not None:
        raise UsageError("--transform as text is for a MODEL string", "give the function itself")
    if inputs.input:
        raise UsageError("--input as text is for a MODEL string", "forward_args={'t': 10}")
    module = unwrapped(module)
    tensor = next(iter([*module.parameters(), *module.buffers()]), torch.empty(0))
    record = {
        "kind": "module",
        "type": type(module).__name__,
        "parameters": digests.of_module(module),
    }
    preprocess = choose_preprocess(module, None, inputs)
    named, scores = classes.names(module), classes.scores(module)
    return LoadedModel(module, preprocess, tensor.device, record, named, scores)


@contextmanager
def fed(
    model: LoadedModel,
    inputs: InputOptions,
    transform: UserTransform | None,
    further: Mapping[str, Any],
) -> Iterator[LoadedModel]:
    """The model with a function of the caller's as its preprocessing, or with further arguments for
    its forward; the hooks that pass them are removed at the end.

    Args:
        transform: from a PIL image or an array to what forward takes, as `--transform` names it.
        further: as `arguments.from_values` takes them.

    Raises:
        UsageError: forward takes no such argument, or gets it twice.
        LoadError: the transform fails on an empty image.
    """
    with ExitStack() as hooks:
        preprocess = model.preprocess
        if transform is not None:
            preprocess, hook = by_function(transform, inputs, model.module)
            hooks.callback(hook.remove if hook is not None else lambda: None)
        if further:
            given = arguments.from_values(further)
            taken = getattr(preprocess.transform, "names", ())
            hooks.callback(arguments.bind(model.module, given, taken, model.device).remove)
            preprocess = replace(preprocess, further=tuple(one.words for one in given))
        yield replace(model, preprocess=preprocess)
