"""From a MODEL string to a module on its device; and files: whole models, exported programs, and
weights with the architecture that they belong to."""

from __future__ import annotations

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

from featviz.errors import LoadError, UsageError
from featviz.models import arguments, digests, identify, zoo
from featviz.models.arguments import UserTransform
from featviz.models.factory import unknown_weights
from featviz.models.files import checkpoint, exported, sniff
from featviz.models.files.state_dict import stripped_forms, unwrap, unwrapped
from featviz.models.huggingface import ImageTower, architecture_beside
from featviz.models.preprocess import Preprocess
from featviz.models.presets import choose_preprocess, from_ultralytics
from featviz.models.requirements import UnfitError, pick_device, unfit
from featviz.models.sources import Loaded, load_source, source_of
from featviz.models.weights import in_full_precision, put_into
from featviz.options import InputOptions, ModelOptions
from featviz.text import printable

log = logging.getLogger(__name__)


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
    """Load a model, ready to be run; one that is loaded stays as it is.

    Raises:
        UsageError: no such name, file or device, or a bad option.
        LoadError: there is something, but no model can be made of it.
        UnfitError: it needs torchvision, which does not fit torch.
    """
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
            raise LoadError(
                f"the model's {name} is on the device meta, where tensors have no values",
                "call model.to_empty(device='cpu') where it is built, and load weights",
            )
    module = in_full_precision(unwrapped(loaded.module), device).to(device)
    transform = None if inputs.transform is None else UserTransform.named(inputs.transform)
    if transform is not None:
        preprocess = transform.preprocess(inputs.channels or 3)
    else:
        preprocess = choose_preprocess(module, loaded.entry, inputs, loaded.fixed)
    further = arguments.parse(inputs.forward_args)
    preprocess, _ = arguments.feed(module, preprocess, transform, further, device)
    built_with = {name: repr(value) for name, value in options.model_args.items()}
    source = {**loaded.source, **({"arguments": built_with} if built_with else {})}
    trained = loaded.source.get("weights") != "none"  # random weights know no classes
    categories = tuple(getattr(loaded.entry, "meta", {}).get("categories", ())) if trained else ()
    named = class_names(module) or categories
    return LoadedModel(module, preprocess, device, source, named, scores(module))


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
    if inputs.forward_args:
        raise UsageError("forward_args as text is for a MODEL string", "forward_args={'t': 10}")
    module = unwrapped(module)
    tensor = next(iter([*module.parameters(), *module.buffers()]), torch.empty(0))
    digest = digests.of_module(module)
    record = {"kind": "module", "type": type(module).__name__, "parameters": digest}
    preprocess = choose_preprocess(module, None, inputs)
    named = class_names(module)
    return LoadedModel(module, preprocess, tensor.device, record, named, scores(module))


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
    preprocess = model.preprocess
    if transform is not None:
        preprocess = transform.preprocess(inputs.channels or 3)
    values = arguments.from_values(further)
    preprocess, hooks = arguments.feed(model.module, preprocess, transform, values, model.device)
    try:
        yield replace(model, preprocess=preprocess)
    finally:
        for hook in hooks:
            hook.remove()


def scores(module: nn.Module) -> str | None:
    """Where the scores of classes are in a model's output: a key, empty for the output itself, or
    None where the model says that it is no classifier.

    Models of transformers say it by their class, also where they were exported, those of
    Ultralytics by theirs, those of timm by `num_classes`; others say nothing, and are taken for
    classifiers.
    """
    name, library = _class_and_library(module)
    if library == "ultralytics":
        return "1" if name.endswith(".ClassificationModel") else None  # (shares, scores)
    if library == "transformers":
        return "logits" if "ForImageClassification" in name else None
    return None if getattr(module, "num_classes", None) == 0 else ""


def class_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the classes by number, where a classifier of transformers or Ultralytics has one
    for each."""
    library, labels = _class_and_library(module)[1], None
    if scores(module) is not None and library == "ultralytics":
        labels = getattr(module, "names", None)
    elif scores(module) is not None and library == "transformers":
        labels = getattr(getattr(module, "config", None), "id2label", None)
    if not isinstance(labels, Mapping) or set(labels) != set(range(len(labels))):
        return ()
    return tuple(printable(str(labels[number])) for number in range(len(labels)))


def _class_and_library(module: nn.Module) -> tuple[str, str]:
    """The full name of a module's class, or of the one that an exported module stands for, and the
    library that it is of, also where somebody derived it from a class of theirs."""
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    original = getattr(module, "type_name", None)
    if kind.__module__ == "torch.export.unflatten" and original is not None:
        name = str(original() or "")
    if kind.__module__.startswith("ultralytics."):
        return name, "ultralytics"
    homes = [name, *(base.__module__ for base in kind.__mro__)]
    of_theirs = isinstance(module, ImageTower) or any(h.startswith("transformers.") for h in homes)
    return name, "transformers" if of_theirs else ""


# Files ----------------------------------------------------------------------------------------


def load_file(options: ModelOptions) -> Loaded:
    """Load a file; weights into `options.arch`, else into what a config.json beside the file names,
    else into the architecture whose tensors they are.

    Raises:
        UsageError: the architecture is a file, or there is no such name.
        LoadError: the file holds no model, or weights that fit no known architecture.
    """
    path = Path(options.spec)
    if options.arch is None and (beside := zoo.timm_name_beside(path)):
        log.info("%s: config.json beside it says timm:%s", path.name, beside)
        options = structs.replace(options, arch=f"timm:{beside}")
    if options.arch is None and (name := architecture_beside(path)):
        log.info("%s: config.json beside it says %s", path.name, name)
        if sniff.sniff(path) != sniff.EXPORTED:  # a program is a model of its own
            options = structs.replace(options, arch=f"hf:{path.parent}")
    if options.arch is None and options.hparams:
        raise UsageError(
            f"--model-arg @hparams is for a class of your own, and none is named for {path.name}",
            "--arch net.py:CLASS names it",
        )
    if options.arch is None:
        return _from_content(path, options)
    source = source_of(options.arch, "--arch")
    if source.kind == "file":
        raise UsageError(
            f"--arch {options.arch!r} is a file of its own", "give a name or a factory"
        )
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
    forms = stripped_forms(weights)
    known = identify.identify_forms(forms)
    if known.name is None and known.nearest and options.partial:
        known = replace(known, names=(known.nearest[0].name,))
    elif known.name is None:
        near = f"; nearest: {', '.join(n.words for n in known.nearest)}" if known.nearest else ""
        raise unknown_weights(path.name, content) or LoadError(
            f"{path.name} holds weights of an architecture that torchvision has not{near}",
            "--arch says what they belong to (a name, timm:NAME, or file.py:factory)"
            + ("; --partial loads what fits into the nearest" if near else ""),
        )
    arguments = known.arguments
    module, entry = zoo.build_torchvision(
        str(known.name), None, options.seed, {**arguments, **options.model_args}
    )
    log.info("%s: %s", path.name, "; ".join((*known.form.steps, known.words)))
    loaded = put_into(
        module, known.form.tensors, f"{path.name} does not fit {known.name}", options.partial
    )
    taken = [*known.form.steps, loaded]
    return Loaded(module, entry, {**record, "arch": known.name, **arguments, "taken": taken})
