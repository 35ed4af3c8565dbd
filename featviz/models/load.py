"""From a MODEL string to a module on its device; files (whole models, programs, weights with the
architecture that they belong to), and factories, the user's own code."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import nn
from torch.nn.parameter import is_lazy

from featviz.errors import LoadError, UsageError
from featviz.models import arguments, checkpoint, code, digests, exported, identify, sniff, zoo
from featviz.models.arguments import Numbers, UserTransform
from featviz.models.checkpoint import unwrapped
from featviz.models.huggingface import ImageTower, architecture_beside
from featviz.models.preprocess import Preprocess
from featviz.models.presets import choose_preprocess, from_ultralytics, required_arguments
from featviz.models.requirements import UnfitError, pick_device, unfit
from featviz.models.sources import Loaded, load_source, source_of
from featviz.models.weights import (
    in_full_precision,
    put_into,
    put_weights,
    read_weights,
    stripped_forms,
    unwrap,
)
from featviz.options import InputOptions, ModelOptions
from featviz.text import listed, printable, quoted

log = logging.getLogger(__name__)

_HPARAMS = "hyper_parameters"
"""Where Lightning keeps the arguments of a class that called save_hyperparameters()."""


@dataclass(frozen=True)
class LoadedModel:
    """A module on its device, and how to feed it."""

    module: nn.Module
    preprocess: Preprocess
    device: torch.device
    source: Mapping[str, Any]
    """The model for run.json: its kind, name or file, and weights; no absolute path."""
    categories: tuple[str, ...] = ()
    scores: str | None = ""
    """Where in the output the scores of classes are: a key, empty for the output itself, or None
    where the model is no classifier."""


def load_model(options: ModelOptions | LoadedModel, inputs: InputOptions) -> LoadedModel:
    """Load a model, ready to be run; one that is loaded stays as it is."""
    if isinstance(options, LoadedModel):
        return options
    device = pick_device(options.device)
    try:
        loaded = load_source(options)
    except Exception as error:
        if "operator torchvision::" in str(error) and not isinstance(error, UnfitError):
            raise unfit(error) from error
        raise
    for name, tensor in [*loaded.module.named_parameters(), *loaded.module.named_buffers()]:
        if not is_lazy(tensor) and tensor.is_meta:
            words = f"the model's {name} is on the device meta, where tensors have no values"
            raise LoadError(words, "model.to_empty(device='cpu') where it is built, and weights")
    module = in_full_precision(unwrapped(loaded.module), device).to(device)
    transform: UserTransform | Numbers | None = None
    if inputs.input:
        transform = Numbers.given(inputs.input, options.seed)
    elif inputs.transform is not None:
        transform = UserTransform.named(inputs.transform)
    if transform is not None:
        preprocess = transform.preprocess(inputs.channels or 3)
    else:
        preprocess = choose_preprocess(module, loaded.entry, inputs, loaded.fixed)
    further = arguments.parse(inputs.forward_args, options.seed)
    preprocess, _ = arguments.feed(module, preprocess, transform, further, device)
    source = dict(loaded.source)
    if options.model_args:
        source["arguments"] = {name: repr(value) for name, value in options.model_args.items()}
    trained = loaded.source.get("weights") != "none"  # random weights know no classes
    categories = tuple(getattr(loaded.entry, "meta", {}).get("categories", ())) if trained else ()
    scores, names = _classes(module)
    return LoadedModel(module, preprocess, device, source, names or categories, scores)


def adopt(module: nn.Module, inputs: InputOptions) -> LoadedModel:
    """Take a module that the caller already has, where it is, out of what wraps it."""
    if inputs.transform is not None:
        raise UsageError("--transform as text is for a MODEL string", "give the function itself")
    if inputs.forward_args:
        raise UsageError("forward_args as text is for a MODEL string", "forward_args={'t': 10}")
    module = unwrapped(module)
    tensor = next(iter([*module.parameters(), *module.buffers()]), torch.empty(0))
    digest = digests.of_module(module)
    record = {"kind": "module", "type": type(module).__name__, "parameters": digest}
    preprocess = choose_preprocess(module, None, inputs)
    scores, names = _classes(module)
    return LoadedModel(module, preprocess, tensor.device, record, names, scores)


@contextmanager
def fed(
    model: LoadedModel,
    inputs: InputOptions,
    transform: UserTransform | Numbers | None,
    further: Mapping[str, Any],
) -> Iterator[LoadedModel]:
    """The model with a function of the caller's as its preprocessing (as `--transform` names it),
    or with further arguments for its forward; the hooks that pass them are removed at the end."""
    preprocess = model.preprocess
    if transform is not None:
        preprocess = transform.preprocess(inputs.channels or 3)
    values = arguments.from_values(further)
    if preprocess.transform is None:  # each given argument is an image less that forward needs
        count = inputs.inputs or required_arguments(model.module, values)
        preprocess = replace(preprocess, inputs=count)
    preprocess, hooks = arguments.feed(model.module, preprocess, transform, values, model.device)
    try:
        yield replace(model, preprocess=preprocess)
    finally:
        for hook in hooks:
            hook.remove()


def _classes(module: nn.Module) -> tuple[str | None, tuple[str, ...]]:
    """Where the scores of classes are in a model's output (a key, empty for the output itself, None
    where its library says that it is no classifier), and the names of the classes by number."""
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__ == "torch.export.unflatten" and hasattr(module, "type_name"):
        name = str(module.type_name() or "")  # type: ignore[operator]  # of the original
    homes = [name, *(base.__module__ for base in kind.__mro__)]
    if kind.__module__.startswith("ultralytics."):
        scores = "1" if name.endswith(".ClassificationModel") else None  # (shares, scores)
        labels = getattr(module, "names", None)
    elif isinstance(module, ImageTower) or any(h.startswith("transformers.") for h in homes):
        scores = "logits" if "ForImageClassification" in name else None
        labels = getattr(getattr(module, "config", None), "id2label", None)
    else:
        return None if getattr(module, "num_classes", None) == 0 else "", ()  # timm's
    numbers = range(len(labels)) if isinstance(labels, Mapping) else range(0)
    if scores is None or not isinstance(labels, Mapping) or set(labels) != set(numbers):
        return scores, ()
    return scores, tuple(printable(str(labels[number])) for number in numbers)


# Files ----------------------------------------------------------------------------------------


def load_file(options: ModelOptions) -> Loaded:
    """Load a file; weights into `options.arch`, else into what a config.json beside the file names,
    else into the architecture whose tensors they are."""
    path = Path(options.spec)
    if options.arch is None and (beside := zoo.timm_name_beside(path)):
        log.info("%s: config.json beside it says timm:%s", path.name, beside)
        options = structs.replace(options, arch=f"timm:{beside}")
    if options.arch is None and (name := architecture_beside(path)):
        log.info("%s: config.json beside it says %s", path.name, name)
        if sniff.sniff(path) != sniff.EXPORTED:  # a program is a model of its own
            options = structs.replace(options, arch=f"hf:{path.parent}")
    if options.arch is None and options.hparams:
        words = f"--model-arg @hparams is for a class of your own, and {path.name} names none"
        raise UsageError(words, "--arch net.py:CLASS names it")
    if options.arch is None:
        return _from_content(path, options)
    source = source_of(options.arch, "--arch")
    if source.kind == "file":
        words = f"--arch {options.arch!r} is a file of its own"
        raise UsageError(words, "give a name or a factory")
    arch = options.arch if source.certain else source.name(options.arch)
    base = load_source(structs.replace(options, spec=options.arch, arch=None, weights=str(path)))
    return replace(base, source={**base.source, "kind": "file", "arch": arch})


def _from_content(path: Path, options: ModelOptions) -> Loaded:
    """A whole model as it is; weights in the architecture that they say they belong to."""
    record = {"kind": "file", **checkpoint.record(path)}
    if sniff.sniff(path) == sniff.EXPORTED:
        program, fixed = exported.read(path, options.trust, pick_device(options.device))
        return Loaded(program, None, record, fixed)
    content = checkpoint.read(path, options.trust)
    if isinstance(content, nn.Module) and options.key is None:
        return Loaded(content, None, record)
    weights = unwrap(content, options.key, options.strip_prefix, options.ema, path.name)
    if weights.module is not None:
        arguments = content.get("train_args") if isinstance(content, Mapping) else None
        entry = from_ultralytics(weights.module, arguments)
        return Loaded(weights.module, entry, {**record, "taken": list(weights.steps)})
    known = identify.identify_forms(stripped_forms(weights))
    if known.name is None and known.nearest and options.partial:
        known = replace(known, names=(known.nearest[0].name,))
    elif known.name is None:
        keys = content.keys() if isinstance(content, Mapping) else ()
        if _HPARAMS in keys or "pytorch-lightning_version" in keys:
            found = content.get(_HPARAMS)
            names = [quoted(str(name)) for name in found] if isinstance(found, Mapping) else []
            has = f"; it has {_HPARAMS}: {listed(names, 8)}" if names else ""
            raise LoadError(
                f"{path.name} is a Lightning checkpoint, and does not say of which class{has}",
                "name the class: --arch net.py:CLASS" + (" --model-arg @hparams" if names else ""),
            )
        near = f"; {known.words}" if known.nearest else ""
        raise LoadError(
            f"{path.name} matches no torchvision architecture{near}",
            "--arch says what its weights belong to (a name, timm:NAME, or file.py:factory)"
            + ("; --partial loads what fits into the nearest" if near else ""),
        )
    built_with = {**known.arguments, **options.model_args}
    module, entry = zoo.build_torchvision(str(known.name), None, options.seed, built_with)
    log.info("%s: %s", path.name, "; ".join((*known.form.steps, known.words)))
    what = f"{path.name} does not fit {known.name}"
    taken = [*known.form.steps, put_into(module, known.form.tensors, what, options.partial)]
    return Loaded(module, entry, {**record, "arch": known.name, **known.arguments, "taken": taken})


# Factories, `pkg.mod:factory` and `file.py:factory` --------------------------------------------


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
    spec = options.spec
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(options.seed)
        module = code.target(spec)
        if not isinstance(module, nn.Module):
            if not callable(module):
                kind = type(module).__name__
                raise LoadError(f"{spec} is a {kind}, not a factory", "name a function or a class")
            given = _given(module, spec.rpartition(":")[2], options.model_args, hparams)
            try:
                module = module(**given)
            except Exception as error:
                raise code.raised(f"{spec} raised", error) from error
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise LoadError(f"{spec} gave a {kind}, not an nn.Module", "return the model")
    record: dict[str, Any] = {"seed": options.seed}
    if path is not None:
        record = put_weights(module, read_weights(path, options), path, options)
    if hparams:
        record[_HPARAMS] = {name: quoted(repr(value)) for name, value in hparams.items()}
    if (digest := code.digest(spec)) is not None:
        record["code_sha256"] = digest
    parameters = digests.of_module(module)
    if parameters is not None or path is None:  # else the file's sha256 tells it from others
        record["parameters"] = parameters
    return Loaded(module, None, {"kind": "factory", "name": source_of(spec).name(spec), **record})


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
        kind = f"{_HPARAMS} that are a {type(found).__name__}, no dict"
        words = f"--model-arg @hparams: {file} has {kind if found else f'no {_HPARAMS}'}"
        raise LoadError(words, "give the arguments: --model-arg NAME=VALUE, repeatable")
    named = {str(key): value for key, value in found.items()}
    name = content.get("hparams_name")
    return {name: named} if isinstance(name, str) and name not in ("", "kwargs") else named
