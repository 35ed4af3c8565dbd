"""From a MODEL string to a module on its device; files (whole models, programs, weights with the
architecture that they belong to), and factories, the user's own code."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import nn
from torch.nn.parameter import is_lazy

from featviz.errors import FeatvizError, LoadError, UsageError
from featviz.models import arguments, code, exported, weights, zoo
from featviz.models.arguments import UserTransform
from featviz.models.preprocess import Preprocess
from featviz.models.presets import choose_preprocess, from_ultralytics, required_arguments
from featviz.models.requirements import pick_device, unfit
from featviz.models.sources import ANY, EXPORTED, Loaded, load_source, sniff, source_of
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
        module, record, entry, fixed = load_source(options)
    except Exception as error:
        if "operator torchvision::" in str(error) and not isinstance(error, FeatvizError):
            raise unfit(error) from error
        raise
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if not is_lazy(tensor) and tensor.is_meta:
            words = f"the model's {name} is on the device meta, where tensors have no values"
            raise LoadError(words, "model.to_empty(device='cpu') where it is built, and weights")
    module = weights.unwrapped(module)
    if device.type == "cpu" and any(t.dtype in (torch.float16, torch.bfloat16) for _, t in tensors):
        log.info("half precision is cast to float32 on the CPU")  # where many operations lack it
        module = module.float()
    module = module.to(device)
    transform: UserTransform | None = None
    if inputs.input:
        transform = UserTransform.input(inputs.input, options.seed)
    elif inputs.transform is not None:
        transform = UserTransform.named(inputs.transform)
    further = arguments.parse(inputs.forward_args, options.seed) if inputs.forward_args else []
    if transform is not None:
        preprocess = transform.preprocess(inputs.channels or 3)
    else:
        preprocess = choose_preprocess(module, entry, inputs, fixed, further)
    if transform is not None or further:
        preprocess, _ = arguments.feed(module, preprocess, transform, further, device)
    source = dict(record)
    if options.model_args:
        source["arguments"] = {name: repr(value) for name, value in options.model_args.items()}
    trained = record.get("weights") != "none"  # random weights know no classes
    categories = tuple(getattr(entry, "meta", {}).get("categories", ())) if trained else ()
    scores, names = _classes(module)
    return LoadedModel(module, preprocess, device, source, names or categories, scores)


def adopt(module: nn.Module, inputs: InputOptions) -> LoadedModel:
    """Take a module that the caller already has, where it is, out of what wraps it."""
    if inputs.transform is not None:
        raise UsageError("--transform as text is for a MODEL string", "give the function itself")
    if inputs.forward_args:
        raise UsageError("forward_args as text is for a MODEL string", "forward_args={'t': 10}")
    module = weights.unwrapped(module)
    tensor = next(iter([*module.parameters(), *module.buffers()]), torch.empty(0))
    source = {"kind": "module", "type": type(module).__name__, "parameters": weights.digest(module)}
    preprocess = choose_preprocess(module, None, inputs)
    scores, names = _classes(module)
    return LoadedModel(module, preprocess, tensor.device, source, names, scores)


@contextmanager
def fed(
    model: LoadedModel,
    inputs: InputOptions,
    transform: UserTransform | None,
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
    elif any(home.startswith(("transformers.", "featviz.models.huggingface.")) for home in homes):
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
    path, arch = Path(options.spec), options.arch
    if arch is None and (beside := zoo.architecture_beside(path)):
        log.info("%s: config.json beside it says %s", path.name, beside)
        if beside.startswith("timm:"):
            arch = beside
        elif sniff(path) != EXPORTED:  # a program is a model of its own
            arch = f"hf:{path.parent}"
    if arch is None:
        return _as_it_is(path, options)
    source = source_of(arch, "--arch")
    if source.kind == "file":
        words = f"--arch {arch!r} is a file of its own"
        raise UsageError(words, "give a name or a factory")
    given = structs.replace(options, spec=arch, arch=None, weights=str(path))
    module, record, entry, fixed = load_source(given)
    arch = arch if source.certain else source.name(arch)
    return module, {**record, "kind": "file", "arch": arch}, entry, fixed


def _as_it_is(path: Path, options: ModelOptions) -> Loaded:
    """A whole model; weights in the architecture of torchvision whose tensors they are."""
    if options.hparams:
        words = f"--model-arg @hparams is for a class of your own, and {path.name} names none"
        raise UsageError(words, "--arch net.py:CLASS names it")
    record = {"kind": "file", **weights.record(path)}
    if sniff(path) == EXPORTED:
        program, fixed = exported.read(path, options.trust, pick_device(options.device))
        return program, record, None, fixed
    content = weights.read(path, options.trust)
    if isinstance(content, nn.Module) and options.key is None:
        return content, record, None, ANY
    found = weights.unwrap(content, options.key, options.strip_prefix, options.ema, path.name)
    if found.module is not None:
        trained = content.get("train_args") if isinstance(content, Mapping) else None
        entry: Any = from_ultralytics(found.module, trained)
        return found.module, {**record, "taken": list(found.steps)}, entry, ANY
    from featviz.models import identify

    known = identify.identify_forms(weights.stripped_forms(found))
    name = known.name or (known.nearest[0][0] if known.nearest and options.partial else None)
    if name is None:
        remedy = "--arch says what its weights belong to (a name, timm:NAME, or file.py:factory)"
        words = f"{path.name} matches no torchvision architecture"
        if isinstance(content, Mapping) and "pytorch-lightning_version" in content:
            words = f"{path.name} is a Lightning checkpoint, and does not say of which class"
            remedy = "name the class: --arch net.py:CLASS"
            if hparams := content.get(_HPARAMS):
                words += f"; it has {_HPARAMS}: {listed([*map(quoted, map(str, hparams))], 8)}"
                remedy += " --model-arg @hparams"
        elif known.nearest:
            words += f"; {known.words}"
            remedy += "; --partial loads what fits into the nearest"
        raise LoadError(words, remedy)
    built_with = {**known.arguments, **options.model_args}
    module, entry = zoo.build_torchvision(name, None, options.seed, built_with)
    log.info("%s: %s", path.name, "; ".join((*known.form.steps, known.words)))
    what, tensors = f"{path.name} does not fit {name}", known.form.tensors
    taken = [*known.form.steps, weights.put_into(module, tensors, what, options.partial)]
    return module, {**record, "arch": name, **known.arguments, "taken": taken}, entry, ANY


# Factories, `pkg.mod:factory` and `file.py:factory` --------------------------------------------


def load_factory(options: ModelOptions) -> Loaded:
    """Call the factory; give the model the weights of a file, if one is named."""
    path = None if options.weights in (None, "none") else Path(str(options.weights))
    if path is not None and not path.is_file():
        raise UsageError(f"no weights file {options.weights!r}", "a factory takes a file, or none")
    hparams: dict[str, Any] = {}
    if options.hparams:
        content = weights.read(path, options.trust) if path is not None else None
        found = content.get(_HPARAMS) if isinstance(content, Mapping) else None
        if not isinstance(found, Mapping) or not found:
            words = f"--model-arg @hparams: {path and path.name} has no dict of {_HPARAMS}"
            raise LoadError(words, "--weights names a Lightning checkpoint; or NAME=VALUE for each")
        hparams, name = (
            {str(key): value for key, value in found.items()},
            content.get("hparams_name"),
        )
        if isinstance(name, str) and name not in ("", "kwargs"):  # one argument has all of them
            hparams = {name: hparams}
    spec = options.spec
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(options.seed)
        module = code.target(spec)
        if not isinstance(module, nn.Module):
            if not callable(module):
                kind = type(module).__name__
                raise LoadError(f"{spec} is a {kind}, not a factory", "name a function or a class")
            try:
                if hparams:  # those that it takes, as Lightning itself chooses them
                    taken = inspect.signature(module).parameters
                    if not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
                        hparams = {name: value for name, value in hparams.items() if name in taken}
                module = module(**{**hparams, **options.model_args})
            except Exception as error:
                words = f"{spec} raised {type(error).__name__}: {error}"
                raise LoadError(words, "-v shows the traceback") from error
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise LoadError(f"{spec} gave a {kind}, not an nn.Module", "return the model")
    record: dict[str, Any] = {"seed": options.seed}
    if path is not None:
        tensors = weights.read_weights(path, options)
        record = weights.put_weights(module, tensors, path, options)
    if hparams:
        record[_HPARAMS] = {name: quoted(repr(value)) for name, value in hparams.items()}
    if (digest := code.digest(spec)) is not None:
        record["code_sha256"] = digest
    parameters = weights.digest(module)
    if parameters is not None or path is None:  # else the file's sha256 tells it from others
        record["parameters"] = parameters
    return module, {"kind": "factory", "name": source_of(spec).name(spec), **record}, None, ANY
