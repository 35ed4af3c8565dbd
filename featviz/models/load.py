"""Load the model that a MODEL string names, onto its device. It may be a file (a whole
model, a program, or weights of a known architecture), a name of torchvision or timm, or the
user's own code."""

from __future__ import annotations

import inspect
import logging
import pickle
import re
import sys
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import urlparse

import torch
from msgspec import structs
from torch import nn
from torch.nn.parameter import is_lazy

from featviz.errors import (
    OF_THE_START,
    FeatvizError,
    FileError,
    LoadError,
    UsageError,
)
from featviz.files import read_json
from featviz.models import arguments, identify, weights
from featviz.models.arguments import UserTransform
from featviz.models.classes import read_classes
from featviz.models.onnx_model import load_onnx
from featviz.models.preprocess import Chain, Preprocess
from featviz.models.presets import (
    choose_preprocess,
    from_timm,
    from_ultralytics,
    images_per_forward,
)
from featviz.models.rebuild import UnbuiltModule
from featviz.models.requirements import (
    pick_device,
    require_torchvision,
)
from featviz.models.sources import (
    EXPORTED,
    ONNX,
    Loaded,
    code_digest,
    imported_object,
    load_source,
    sniff,
    source_of,
    unknown_name_error,
)
from featviz.options import InputOptions, ModelOptions
from featviz.text import did_you_mean, first_line, listed, printable, quoted

log = logging.getLogger(__name__)

_HUB_FILES = ("model.safetensors", "pytorch_model.bin")

_HUB_SECONDS = 4

_OF_TRANSFORMERS = ("transformers.", "featviz.models.huggingface.")
"""Beginnings of the full names of classes of transformers, and of featviz's class for a part
of such a model."""

_HPARAMS = "hyper_parameters"
"""The key under which Lightning keeps the arguments of a model's class in a checkpoint."""


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, ready to be run, and how images become its input."""

    module: nn.Module
    preprocess: Preprocess
    device: torch.device
    source: Mapping[str, Any]
    """What run.json says of the model; without absolute paths."""
    categories: tuple[str, ...] = ()
    """The names of its classes in the order of their numbers; empty if they are not known."""
    scores: str | None = ""
    """The part of the output that has the scores of classes, by its key; empty if the whole
    output is scores, None if no part is."""
    names_file: str = ""
    """The user's source of the names of classes: the file of --classes, or a short form of a
    list. Empty if the names are the model's own."""

    @property
    def weights_note(self) -> str:
        """The text after the model's name in titles of pictures: ` (random weights)`; empty
        for other weights."""
        return " (random weights)" if self.source.get("weights") == "none" else ""


def load_model(
    options: ModelOptions | LoadedModel, inputs: InputOptions
) -> LoadedModel:
    """Load a model, ready to be run.

    Args:
        options: The model to load. A LoadedModel is returned as it is.
        inputs: The user's choices for the model's input.

    Returns:
        The model on its device, with its preprocessing and the names of its classes.

    Raises:
        LoadError: Where the model cannot be loaded.
        UsageError: Where the options name something that does not exist, or do not go
            together.
    """
    if isinstance(options, LoadedModel):
        return options
    class_names = () if options.classes is None else read_classes(options.classes)
    device = pick_device(options.device)
    loaded = load_source(options)
    module = _on_device(loaded.module, options.spec, device)
    preprocess = _preprocess(module, loaded, inputs, options.seed, device)
    source = dict(loaded.record)
    if options.model_args:
        source["arguments"] = {
            name: repr(value) for name, value in options.model_args.items()
        }
    scores, categories = _classes(module)
    categories = categories or loaded.classes
    # outputs of random weights mean no classes, so they get no names
    if not categories and source.get("weights") != "none":
        categories = tuple(getattr(loaded.entry, "meta", {}).get("categories", ()))
    return LoadedModel(
        module,
        preprocess,
        device,
        source,
        class_names or categories,
        scores,
        names_file=str(options.classes or ""),
    )


def _on_device(module: nn.Module, spec: str, device: torch.device) -> nn.Module:
    """Take a module out of its wrappers, and put it on a device. On a CPU, half precision
    becomes float32.

    Args:
        module: The module, which is changed in place.
        spec: MODEL as it was typed, for messages.
        device: The device.

    Raises:
        LoadError: Where the tensors of the module have no values, or a wrapper contains
            itself.
    """
    refuse_meta(module)
    # in a file a wrapper may contain itself, and `unwrap` recurses without end
    with weights.as_load_errors(Path(spec)):
        module = weights.unwrap(module)
    dtypes = {tensor.dtype for tensor in [*module.parameters(), *module.buffers()]}
    # on a CPU, many operations do not work in half precision
    if device.type == "cpu" and dtypes & {torch.float16, torch.bfloat16}:
        log.debug("half precision is cast to float32 on the CPU")
        module = module.float()
    return module.to(device)


def _preprocess(
    module: nn.Module,
    loaded: Loaded,
    inputs: InputOptions,
    seed: int,
    device: torch.device,
) -> Preprocess:
    """Choose how images become the model's input: by `--input`, by `--transform`, or as the
    model's source says. If these options or `--forward-arg` give further arguments of
    forward, hooks are added to the module that pass them.

    Args:
        module: The model, on its device.
        loaded: The same model as its source returned it.
        inputs: The user's options.
        seed: The seed of random numbers in `--input` and `--forward-arg`.
        device: The device for tensors among the further arguments.

    Raises:
        UsageError: Where an option cannot be read, or does not go with the model.
        LoadError: Where the function of `--transform` cannot be imported, or fails.
    """
    # this is read first, so that a mistyped value is reported before other errors
    forward_arguments = arguments.parse(inputs.forward_args, seed)
    transform = None
    if inputs.input:
        transform = UserTransform.input(inputs.input, seed)
    elif inputs.transform is not None:
        transform = UserTransform.named(inputs.transform)
    if transform is not None:
        preprocess = transform.preprocess(inputs.input_channels or 3)
    else:
        preprocess = choose_preprocess(
            module, loaded.entry, inputs, loaded.input, forward_arguments
        )
    preprocess, _ = arguments.add_hooks(
        module, preprocess, transform, forward_arguments, device
    )
    return preprocess


def adopt(
    module: nn.Module,
    inputs: InputOptions,
    classes: str | Path | Sequence[str] | None = None,
) -> LoadedModel:
    """Make a LoadedModel of a module that the caller already has. It stays on its device, and
    is taken out of its wrappers.

    Args:
        module: The module.
        inputs: The user's choices for its input. --transform and --forward-arg are texts
            that only go with a MODEL string.
        classes: The names of its classes, or a file with them; by default the module's own.

    Raises:
        UsageError: Where `inputs` do not go with the module, the module has lazy
            parameters, or the file of the classes cannot be read.
    """
    if inputs.transform is not None:
        raise UsageError(
            "--transform as text is for a MODEL string", "give the function itself"
        )
    if inputs.forward_args:
        raise UsageError(
            "forward_args as text is for a MODEL string", "forward_args={'t': 10}"
        )
    module = weights.unwrap(module)
    _refuse_lazy(module)
    # the device is that of the first tensor; without any tensor it is the CPU
    tensor = next(iter([*module.parameters(), *module.buffers()]), torch.empty(0))
    source = {
        "kind": "module",
        "type": type(module).__name__,
        "parameters": weights.digest(module),
    }
    preprocess = choose_preprocess(module, None, inputs)
    scores, names = _classes(module)
    names_file = ""
    if classes is not None:
        names = read_classes(classes)
        # a list may have a thousand names, so only the first is shown
        is_file = isinstance(classes, (str, Path))
        names_file = str(classes) if is_file else f"[{names[0]!r}, ...]"
    return LoadedModel(
        module,
        preprocess,
        tensor.device,
        source,
        names,
        scores,
        names_file=names_file,
    )


def refuse_meta(module: nn.Module) -> None:
    """Raise a LoadError for a module with a tensor on the device meta, which has no values: its
    layers could be listed, but not run."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not is_lazy(tensor) and tensor.is_meta:
            where = "on the device meta, where tensors have no values"
            raise LoadError(
                f"the model's {name} is {where}",
                "model.to_empty(device='cpu') where it is built, and weights",
            )


def _refuse_lazy(model: nn.Module) -> None:
    """Raise a UsageError for a caller's module with a lazy layer, which gets its size from its
    first input: after a run, the module could not be restored."""
    for name, module in model.named_modules():
        if any(map(is_lazy, module.parameters(recurse=False))):
            label = type(module).__name__
            if name:
                label = f"{name} ({label})"
            raise UsageError(
                f"the model's {label} gets its size from the first input, and saw none",
                "run the model on an input of yours first: model(x)",
            )


@contextmanager
def fed(
    model: LoadedModel,
    inputs: InputOptions,
    transform: UserTransform | None,
    forward_args: Mapping[str, Any],
) -> Iterator[LoadedModel]:
    """A context in which a model has another preprocessing, or gets further arguments of
    forward. Hooks pass these arguments; they are removed at the end of the context.

    Args:
        model: The model.
        inputs: Choices for the input; only `input_channels` and `images_per_pass` are used.
        transform: The new preprocessing; None keeps the model's own.
        forward_args: Values by the names of forward's arguments.

    Yields:
        A LoadedModel with the same module.

    Raises:
        UsageError: Where forward does not take one of the arguments, or the transform
            returns it, too.
        LoadError: Where the transform fails on an empty image.
    """
    preprocess = model.preprocess
    if transform is not None:
        preprocess = transform.preprocess(inputs.input_channels or 3)
    values = arguments.from_values(forward_args)
    if preprocess.transform is None:
        # an argument whose value the user gives is no image
        count = inputs.images_per_pass or images_per_forward(model.module, values)
        preprocess = replace(preprocess, inputs=count)
    preprocess, hooks = arguments.add_hooks(
        model.module, preprocess, transform, values, model.device
    )
    try:
        yield replace(model, preprocess=preprocess)
    finally:
        for hook in hooks:
            hook.remove()


class _Classes(NamedTuple):
    """What a model says of its classes."""

    scores: str | None
    """`LoadedModel.scores`."""
    names: tuple[str, ...] = ()
    """The names of the classes in the order of their numbers; empty if they have none."""


def _classes(module: nn.Module) -> _Classes:
    """The part of a model's output with the scores of classes, and the names of the classes.
    They are looked up where the library of the model's class keeps them."""
    module_class = type(module)
    package = module_class.__module__
    name = f"{package}.{module_class.__qualname__}"
    if package == "torch.export.unflatten" and hasattr(module, "type_name"):
        name = str(module.type_name() or "")  # type: ignore[operator]  # of the original
    if package.startswith("ultralytics."):
        # a classifier returns its probabilities, then the scores
        scores = "1" if name.endswith(".ClassificationModel") else None
        return _Classes(scores, _class_names(getattr(module, "names", None)))
    origins = [name, *(base.__module__ for base in module_class.__mro__)]
    if any(origin.startswith(_OF_TRANSFORMERS) for origin in origins):
        is_classifier = re.search("For(Image|Video)Classification", name)
        scores = "logits" if is_classifier else None
        config = getattr(module, "config", None)
        return _Classes(scores, _class_names(getattr(config, "id2label", None)))
    # timm sets num_classes to 0 if it leaves out the classifier
    if getattr(module, "num_classes", None) == 0:
        return _Classes(None)
    return _Classes("")


def _class_names(labels: Any) -> tuple[str, ...]:
    """The names of a model's classes, in the order of their numbers. Empty if they are only
    numbers, which a library has made up.

    Args:
        labels: A mapping from the numbers 0 to N - 1 to names. For any other value, there
            are no names.
    """
    if not isinstance(labels, Mapping) or set(labels) != set(range(len(labels))):
        return ()
    names = tuple(printable(str(labels[number])) for number in range(len(labels)))
    # libraries make up such names for classes without names
    if all(
        name in (f"{number}", f"LABEL_{number}") for number, name in enumerate(names)
    ):
        return ()
    return names


# Files
# ----------------------------------------------------------------------------------------


def load_file(options: ModelOptions) -> Loaded:
    """Load a model from a file. If `options.arch` or a config.json beside the file names an
    architecture, the file's weights are loaded into that. Otherwise the file is a whole
    model, or it has weights whose torchvision architecture is recognised.

    Raises:
        UsageError: Where an option does not go with the kind of the file.
        LoadError: Where the file cannot be read, or no model can be made of it.
    """
    path = Path(options.spec)
    with weights.as_load_errors(path):
        file_format = sniff(path)
        if file_format == ONNX and options.arch is not None:
            text = f"is for files of weights, and {path.name} is a whole model"
            raise UsageError(f"--arch {text}", "leave --arch out")
        if file_format == ONNX:
            return load_onnx(path)
        # an architecture that the user or a config.json names wins over the file itself
        arch = options.arch or _configured_arch(path, file_format)
        if arch is not None:
            return _load_weights_into(arch, path, options)
        if options.hparams:
            text = f"is for a class of your own, and {path.name} names none"
            raise UsageError(
                f"--model-arg @hparams {text}", "--arch net.py:CLASS names it"
            )
        record = {"kind": "file", **weights.file_record(path)}
        if file_format == EXPORTED:
            device = pick_device(options.device)
            program, fixed = weights.read_program(path, options.trust, device)
            return Loaded(program, record, None, fixed)
        content = weights.read(path, options.trust)
        if isinstance(content, nn.Module) and options.key is None:
            return Loaded(content, record)
        return _load_content(content, record, path, options)


def _load_content(
    content: Any, record: dict[str, Any], path: Path, options: ModelOptions
) -> Loaded:
    """Load a model from the content of a checkpoint: a module in it, or, if it only has
    tensors, the architecture that these belong to.

    Args:
        content: The result of `weights.read`.
        record: What run.json says of the file. It is changed: "taken" is added.
        path: The file.
        options: How the model is loaded.

    Raises:
        LoadError: Where no model can be made of the content.
    """
    state_dict = weights.find_weights(
        content, options.key, options.strip_prefix, options.ema, path.name
    )
    module = state_dict.module
    # the tensors of a module that could not be built do not say how it computes
    if isinstance(module, UnbuiltModule):
        raise module.refusal
    if module is None:
        return _load_recognised(path, content, state_dict, options)
    train_args = content.get("train_args") if isinstance(content, Mapping) else None
    record["taken"] = list(state_dict.steps)
    chain = from_ultralytics(module, train_args)
    return Loaded(module, record, chain, classes=state_dict.classes)


def _configured_arch(path: Path, file_format: str) -> str | None:
    """The MODEL string for the architecture that a config.json beside a file names. None if
    there is no such config.json, or the file is a program, which needs no architecture.

    Args:
        path: The file of a model or its weights.
        file_format: The format of the file, from `sources.sniff`.
    """
    name = None if file_format == EXPORTED else architecture_beside(path)
    if name is None:
        return None
    log.info("%s: config.json beside it says %s", path.name, name)
    if name.startswith("timm:"):
        return name
    return f"hf:{path.parent}"


def _load_weights_into(arch: str, path: Path, options: ModelOptions) -> Loaded:
    """Load the model that a MODEL string names, with the weights of a file.

    Args:
        arch: A MODEL string that does not name a file.
        path: The file of weights.
        options: How the model is loaded; `spec` and `weights` in them are not used.

    Raises:
        UsageError: Where `arch` names a file, or something that does not exist.
        LoadError: Where the model or its weights cannot be loaded.
    """
    source = source_of(arch, "--arch")
    if source.name == "file":
        raise UsageError(
            f"--arch {arch!r} is a file of its own", "give a name or a factory"
        )
    # `--arch NAME FILE` means the same as `NAME --weights FILE`
    loaded = load_source(
        structs.replace(options, spec=arch, arch=None, weights=str(path))
    )
    if source.name in ("huggingface", "factory"):
        arch = source.model_name(arch)
    return loaded._replace(record={**loaded.record, "kind": "file", "arch": arch})


def _load_recognised(
    path: Path, content: Any, state_dict: weights.Weights, options: ModelOptions
) -> Loaded:
    """Find the torchvision architecture that has the tensors of a file, and load them
    into it.

    Args:
        path: The file.
        content: All that the file holds, for the error message.
        state_dict: The tensors that were found in the file, with names of classes.
        options: How the model is loaded. If no architecture has all these tensors,
            `partial` loads those that fit into the nearest architecture.

    Raises:
        LoadError: Where no architecture has these tensors, and `partial` is off or none
            is near; or where the tensors do not fit.
        UsageError: Where the builder does not take one of --model-arg.
    """
    match = identify.best_match(state_dict)
    name = match.name
    # the error without --partial names this nearest architecture
    if name is None and match.nearest and options.partial:
        name = match.nearest[0].name
    if name is None:
        raise _not_recognised(path, content, match)
    module, entry = build_torchvision(
        name, "none", options.seed, {**match.arguments, **options.model_args}
    )
    steps = match.state_dict.steps
    log.info("%s: %s", path.name, "; ".join((*steps, match.description)))
    message = f"{path.name} does not fit {name}"
    loaded = weights.load_tensors(module, match.state_dict.tensors, message, options)
    record = {
        "kind": "file",
        **weights.file_record(path),
        "arch": name,
        **match.arguments,
        "taken": [*steps, loaded],
    }
    return Loaded(module, record, entry, classes=state_dict.classes)


def _not_recognised(path: Path, content: Any, match: identify.Match) -> LoadError:
    """The error for weights that fit no torchvision architecture.

    Args:
        path: The file.
        content: All that the file holds.
        match: The weights, and the nearest architectures.
    """
    # without prefixes, the names may be those of a class in the user's code
    plain = weights.stripped_variants(match.state_dict)[-1]
    arch = weights.class_beside(path, plain.tensors)
    # a Lightning checkpoint mostly has the weights of a class in the user's code
    if isinstance(content, Mapping) and "pytorch-lightning_version" in content:
        message = (
            f"{path.name} is a Lightning checkpoint, and does not say of which class"
        )
        hint = f"name the class: --arch {arch or weights.TO_FILL_IN}"
        hparams = content.get(_HPARAMS)
        if hparams:
            names = listed([quoted(name) for name in hparams], 8)
            message += f"; it has {_HPARAMS}: {names}"
            hint += " --model-arg @hparams"
        return LoadError(message, hint)
    message = f"{path.name} matches no torchvision architecture"
    hint = (
        f"--arch {weights.TO_FILL_IN} or --arch timm:NAME says what its weights are of"
    )
    add: tuple[str, ...] = ()
    if match.nearest:
        message += f"; {match.description}"
        nearest = match.nearest[0].name
        hint += f"; --partial loads what fits into {nearest}"
        add = ("--arch", nearest, "--partial")
    if arch is not None:
        hint = f"{arch} has such modules"
        add = ("--arch", arch)
    return LoadError(message, hint, add=add)


# Names of torchvision and timm (extra `featviz[timm]`)
# ------------------------------------------


def load_torchvision(options: ModelOptions) -> Loaded:
    """Build a model of torchvision or timm (`load_timm` is the same function) with weights of
    the library or of a file, or with random weights.

    Raises:
        UsageError: Where the library has no such model or weights.
        LoadError: Where the model cannot be built, or its weights cannot be fetched or do
            not fit.
    """
    is_timm = options.spec.startswith("timm:")
    name = options.spec.rpartition(":")[2]
    build = _build_timm if is_timm else build_torchvision
    source: dict[str, Any] = {
        "kind": "timm" if is_timm else "torchvision",
        "name": name,
    }
    weights_name = options.weights or "default"
    path = Path(weights_name)
    if path.is_file():
        state_dict = weights.read_weights(path, options)
        # the file may be for another number of classes than the model's default
        sizes = {}
        if is_timm:
            sizes = _sizes_of(name, weights.stripped_variants(state_dict))
        arguments = {**sizes, **options.model_args}
        module, entry = build(name, "none", options.seed, arguments)
        record = weights.load_weights(module, state_dict, path, options)
        record = {**source, **sizes, **record}
        return Loaded(module, record, entry, classes=state_dict.classes)
    module, entry = build(name, weights_name, options.seed, options.model_args)
    source["weights"] = weights_name
    if weights_name == "none":
        log.warning(
            "%s has random weights (--weights none, --seed %d)",
            name,
            options.seed,
            extra=OF_THE_START,
        )
        source["seed"] = options.seed
    return Loaded(module, source, entry)


load_timm = load_torchvision


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """A context with random numbers of this seed. The caller's generator is not changed."""
    with torch.random.fork_rng(devices=()):  # models are made on the CPU
        torch.manual_seed(seed)
        yield


@contextmanager
def _building(
    name: str, seed: int, fetching: str | None, arguments: Collection[str]
) -> Iterator[None]:
    """A context for the call of a library's builder: random numbers have a seed, what the
    library prints goes to stderr, and an error of the library becomes an error of one line.

    Args:
        name: The name of the model, for messages.
        seed: The seed of random weights.
        fetching: A hint: another way to get the weights. None if the library fetches no
            weights.
        arguments: The names of the arguments that the user gives the builder.

    Raises:
        UsageError: Where the builder does not take one of these arguments.
        LoadError: Where the builder fails for any other reason.
    """
    try:
        # torch.hub says on stdout what it downloads, and stdout is only for results
        with _seeded(seed), redirect_stdout(sys.stderr):
            yield
    except (*_READING, TypeError, ValueError, AssertionError, KeyError) as error:
        if fetching is not None and isinstance(error, _READING):
            raise LoadError(
                f"the weights of {name} could not be loaded: {first_line(error)}",
                f"{fetching}, or use --weights none for random ones",
            ) from error
        message = f"{name} could not be built: {first_line(error)}"
        raise _build_error(message, error, arguments, "see --model-arg") from error


_READING = (OSError, EOFError, pickle.UnpicklingError, RuntimeError)
"""The errors of libraries whose weights cannot be fetched, or are in a broken file."""


def _build_error(
    message: str, error: Exception, arguments: Collection[str], hint: str
) -> FeatvizError:
    """The error to raise after code has failed to make a model: a UsageError if it was
    called with a --model-arg that it does not take, else a LoadError.

    Args:
        message: The message of the new error.
        error: The exception that the code raised.
        arguments: The names that the user gives with --model-arg.
        hint: The hint of the new error, unless a list of the arguments that the code
            takes is a better one.
    """
    refused = _REFUSED.match(str(error))
    if refused is None:
        return LoadError(message, hint)
    callee, wrong = refused.groups()
    takes = _arguments_hint(error, callee, wrong)
    if wrong in arguments:
        return UsageError(message, takes)
    return LoadError(message, takes or hint)


_REFUSED = re.compile(
    r"(?:\w+\.)*?(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(\w+)'"
)
"""Python's message when a class or function is called with an argument that it does not
take."""


def _arguments_hint(error: Exception, callee: str, wrong: str) -> str | None:
    """A hint that lists the arguments which a class or function takes; None if no class or
    function of this name is found where the call failed.

    Args:
        error: Python's error for a call with an argument that the callee does not take.
        callee: The name of the class or function.
        wrong: The name of that argument.
    """
    # Builders pass their arguments on, so the callee need not be MODEL itself. The
    # innermost frame has called it, so it has the callee among its names.
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    for value in (*frame.f_locals.values(), *frame.f_globals.values()):
        if not callable(value) or getattr(value, "__name__", None) != callee:
            continue
        names = arguments.argument_names(value)
        takes = f"{callee} takes {', '.join(names) or 'no arguments'}"
        return f"{did_you_mean(wrong, names)} {takes}".lstrip()
    return None


def _missing_arguments_hint(error: Exception) -> str | None:
    """A hint with a --model-arg for each required argument that our call of a factory left
    out; None for another error, and for an error of a call within the factory."""
    missing = re.search(r"missing \d+ required [\w-]+ arguments?: (.+)", str(error))
    trace = error.__traceback__
    if missing is None or trace is None or trace.tb_next is not None:
        return None
    names = re.findall(r"'(\w+)'", missing[1])
    return "add " + " ".join(f"--model-arg {name}=VALUE" for name in names)


def build_torchvision(
    name: str, weights_name: str, seed: int, arguments: Mapping[str, Any]
) -> tuple[nn.Module, Any]:
    """Build a torchvision model.

    Args:
        name: The name of the model, as torchvision lists it.
        weights_name: `default`, the name of a weights entry, or `none` for random weights.
        seed: The seed of random weights.
        arguments: The arguments of the builder, by name.

    Returns:
        The module, and the weights entry whose transforms prepare its images. With random
        weights this is the default entry, or None if torchvision has no weights for the
        model.

    Raises:
        UsageError: Where torchvision has no such model or weights.
        LoadError: Where the builder refuses the arguments, or the weights cannot be
            downloaded.
    """
    require_torchvision()
    from torchvision import models

    if name not in models.list_models():
        raise unknown_name_error("torchvision", name, models.list_models())
    entries = models.get_model_weights(name)
    entry = _weights_entry(name, entries, weights_name)
    loading = {"weights": entry, "progress": sys.stderr.isatty()}
    parameters = inspect.signature(models.get_model_builder(name)).parameters
    # even for a model with random weights, builders of detectors and segmentations would
    # download the weights of the backbone
    if entry is None and "weights_backbone" in parameters.keys() - arguments.keys():
        loading["weights_backbone"] = None
    fetching = None
    if entry is not None:
        file = Path(urlparse(entry.url).path).name
        fetching = f"put {file} into {Path(torch.hub.get_dir()) / 'checkpoints'}"
    label = f"torchvision's {name}" if entry is None else str(entry)
    built = _building(label, seed, fetching, arguments)
    with built, warnings.catch_warnings():
        # inception and googlenet warn that their initialisation will change
        warnings.simplefilter("ignore", FutureWarning)
        module: nn.Module = models.get_model(name, **loading, **arguments)
    return module, entry or getattr(entries, "DEFAULT", None)


def _weights_entry(name: str, entries: Any, weights_name: str) -> Any:
    """The entry of a torchvision model's weights; None for random weights.

    Args:
        name: The name of the model, for messages.
        entries: torchvision's enumeration of the model's weights.
        weights_name: `default`, the name of an entry, or `none` for random weights.

    Raises:
        UsageError: Where the model has no entry of this name, or no weights at all.
    """
    if weights_name == "none":
        return None
    if weights_name == "default":
        weights_name = "DEFAULT"  # as torchvision calls that entry
        if weights_name not in entries.__members__:
            raise UsageError(
                f"torchvision has no weights for {name}", "--weights none, or a file"
            )
    if weights_name in entries.__members__:
        return entries[weights_name]
    message = f"--weights {weights_name!r} is neither a file nor an entry of {name}"
    names = ", ".join(entries.__members__)
    raise UsageError(message, f"one of default, none, {names}")


def architecture_beside(path: Path) -> str | None:
    """The architecture that a `config.json` beside a file of weights names.

    Returns:
        `timm:NAME` or `timm:NAME.TAG`, or the name of a class of transformers. None if the
        config names neither, does not exist, or cannot be read; the last is logged.
    """
    try:
        config = read_json(path.with_name("config.json"))
    except FileNotFoundError:
        return None
    except FileError as error:
        log.warning("%s; %s is loaded without it", error.message, path.name)
        return None
    if not isinstance(config, dict):
        return None
    arch = config.get("architecture")
    with suppress(LoadError):  # where timm is not installed
        if isinstance(arch, str) and _timm().is_model(arch):
            pretrained = config.get("pretrained_cfg")
            tag = pretrained.get("tag") if isinstance(pretrained, dict) else None
            # weights that timm did not publish may have a tag that timm does not know
            suffix = f".{tag}" if tag in _tags(arch) else ""
            return f"timm:{arch}{suffix}"
    match config.get("architectures"):
        case [str(class_name), *_]:
            return class_name
    return None


def _build_timm(
    name: str, weights_name: str, seed: int, arguments: Mapping[str, Any]
) -> tuple[nn.Module, Chain]:
    """Build a timm model.

    Args:
        name: `resnet18` or `resnet18.a1_in1k`.
        weights_name: `default`, a tag such as `a1_in1k`, or `none` for random weights.
        seed: The seed of random weights.
        arguments: The user's arguments of `timm.create_model`, by name.

    Returns:
        The module, and how its images are prepared.

    Raises:
        UsageError: Where timm has no such model or weights.
        LoadError: Where timm refuses the arguments, or the weights cannot be fetched.
    """
    timm = _timm()
    tagged_name = _full_timm_name(name, weights_name)
    pretrained = weights_name != "none"
    fetching = None
    if pretrained:
        config = timm.get_pretrained_cfg(tagged_name)
        _check_pretrained(tagged_name, config, arguments)
        # most weights lie on the hub, older ones at a plain address
        fetching = f"fetch {config.url} for --weights FILE"
        if config.hf_hub_id:
            file = config.hf_hub_filename or _HUB_FILES[0]
            download = f"`hf download {config.hf_hub_id} {file}`"
            fetching = f"{download} elsewhere for --weights FILE"
    with _building(tagged_name, seed, fetching, arguments):
        keywords = {**_hub_overlay(config), **arguments} if pretrained else arguments
        module = timm.create_model(tagged_name, pretrained=pretrained, **keywords)
    return module, _timm_chain(timm.data.resolve_model_data_config(module), arguments)


def _check_pretrained(name: str, config: Any, arguments: Mapping[str, Any]) -> None:
    """Check that timm has weights for a model. Warn if they are for another number of classes
    than the user wants.

    Args:
        name: The name of the model with its tag.
        config: timm's description of the weights; None if there are none.
        arguments: The user's arguments of `timm.create_model`.

    Raises:
        UsageError: Where timm has no weights for it.
    """
    if config is None or not config.has_weights:
        raise UsageError(f"timm has no weights for {name}", "--weights none, or a file")
    # timm then loads no weights of the classifier, and does not say so
    num_classes = arguments.get("num_classes", config.num_classes)
    if num_classes not in (0, config.num_classes):
        log.warning(
            "the classifier of %s is random: its weights have %d classes, not %s",
            name,
            config.num_classes,
            num_classes,
        )


def _hub_overlay(config: Any) -> dict[str, Any]:
    """An argument of `create_model` with the path of the weights in the cache of Hugging Face's
    hub; empty if the weights have to be fetched. Without it, and without a network, the hub's
    client asks the hub for a minute before it looks into the cache.

    Args:
        config: timm's description of the weights.

    Raises:
        OSError: Where the weights are not in the cache, and the hub does not answer within
            _HUB_SECONDS.
    """
    if not config.hf_hub_id:
        return {}
    from huggingface_hub import constants, get_session, try_to_load_from_cache

    for file in [config.hf_hub_filename] if config.hf_hub_filename else _HUB_FILES:
        path = try_to_load_from_cache(config.hf_hub_id, file)
        if isinstance(path, str):
            return {"pretrained_cfg_overlay": {"file": path}}
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except Exception as error:  # of either library that the client may use
        raise OSError(
            f"{constants.ENDPOINT} does not answer: {first_line(error)}"
        ) from error
    return {}


def _timm_chain(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> Chain:
    """The preprocessing of a timm model.

    Args:
        config: timm's description of the input.
        arguments: The user's arguments of the builder; `in_chans` and `img_size` win over
            `config`.
    """
    channels, *size = config["input_size"]
    channels = int(arguments.get("in_chans", channels))
    size = arguments.get("img_size", size)
    height, width = (size, size) if isinstance(size, int) else size
    return from_timm({**config, "input_size": (channels, height, width)})


def _sizes_of(name: str, state_dicts: Sequence[weights.Weights]) -> dict[str, int]:
    """The arguments `num_classes` and `in_chans` with which a timm model has the sizes of given
    weights. An argument that equals the model's default is left out.

    Args:
        name: The name of the model.
        state_dicts: The weights, as `weights.stripped_variants` returns them.
    """
    config = _timm().get_pretrained_cfg(_full_timm_name(name, "none"))
    sizes = {}
    for argument, layer, axis, default in (
        ("num_classes", config.classifier, 0, config.num_classes),
        ("in_chans", config.first_conv, 1, config.input_size[0]),
    ):
        # distilled models have two classifiers
        if isinstance(layer, (tuple, list)) and layer:
            layer = layer[0]
        key = f"{layer}.weight"
        # the names of the last variant have the fewest prefixes, as the model's names have
        shapes = [
            variant.tensors[key].shape
            for variant in state_dicts
            if key in variant.tensors
        ]
        if shapes and len(shapes[-1]) > axis and shapes[-1][axis] != default:
            sizes[argument] = int(shapes[-1][axis])
    return sizes


def _timm() -> ModuleType:
    """The package timm; LoadError where it is not installed."""
    try:
        return import_module("timm")
    except ImportError as error:
        raise LoadError(
            f"timm:NAME needs the package timm: {error}", "pip install 'featviz[timm]'"
        ) from error


def _full_timm_name(name: str, weights_name: str) -> str:
    """The full name of a timm model: `resnet18.a1_in1k`, or `resnet18` if no tag of weights is
    given.

    Args:
        name: The name of the model, with or without a tag.
        weights_name: A tag, `default` or `none`.

    Raises:
        UsageError: Where timm has no such model or no such weights for it, or where the
            two parameters have different tags.
    """
    timm = _timm()
    arch, _, tag = name.partition(".")
    # `hf-hub:user/name` would fetch a config, and build whatever it says
    if "/" in name or not timm.is_model(arch):
        raise unknown_name_error("timm", name, timm.list_models(), "timm:")
    if weights_name not in ("none", "default"):
        if tag and weights_name != tag:
            raise UsageError(
                f"--weights {weights_name} and timm:{name} differ", "leave one out"
            )
        tag = weights_name
    tags = _tags(arch)
    if tag and tag not in tags:
        message = f"{tag!r} is neither a file nor weights that timm has for {arch}"
        names = ", ".join(tags) or "or a file"
        raise UsageError(message, f"one of default, none, {names}")
    if tag:
        return f"{arch}.{tag}"
    return arch


def _tags(arch: str) -> list[str]:
    """The tags of the weights that timm has for an architecture."""
    names = _timm().models.list_pretrained(f"{arch}.*")
    return [name.partition(".")[2] for name in names if name.partition(".")[0] == arch]


# Factories, `pkg.mod:factory` and `file.py:factory`
# --------------------------------------------


def load_factory(options: ModelOptions) -> Loaded:
    """Call the factory; give the model the weights of a file, if one is named.

    Raises:
        UsageError: Where there is no such code, or it does not take one of --model-arg.
        LoadError: Where the factory fails, makes no module, or the weights do not fit.
    """
    spec = options.spec
    path = None
    if options.weights not in (None, "none"):
        path = Path(str(options.weights))
    module, hparams = _make_by_code(options, path)
    name = source_of(spec).model_name(spec)
    if options.weights is None and any(True for _ in module.parameters()):
        log.warning(
            "weights as %s makes them; --weights FILE loads yours",
            name,
            extra=OF_THE_START,
        )
    record: dict[str, Any] = {"kind": "factory", "name": name}
    classes: tuple[str, ...] = ()
    if path is not None:
        state_dict = weights.read_weights(path, options)
        record |= weights.load_weights(module, state_dict, path, options)
        classes = state_dict.classes
    else:
        record["seed"] = options.seed
    if hparams:
        record[_HPARAMS] = {key: quoted(repr(hparams[key])) for key in hparams}
    code_sha256 = code_digest(spec)
    if code_sha256 is not None:
        record["code_sha256"] = code_sha256
    record["parameters"] = weights.digest(module)
    return Loaded(module, record, classes=classes)


def _make_by_code(
    options: ModelOptions, path: Path | None
) -> tuple[nn.Module, dict[str, Any]]:
    """Make a model by the user's code. Returns the model, and the hyper-parameters of a
    checkpoint with which the factory was called.

    Args:
        options: How the model is loaded.
        path: The file of its weights, which may be a Lightning checkpoint; None if no file
            is given.

    Raises:
        UsageError: Where there is no such code, or it does not take one of --model-arg.
        LoadError: Where the import or the factory fails, the factory makes no module, or
            `options` ask for hyper-parameters that the checkpoint does not have.
    """
    hparams = {}
    if options.hparams:
        hparams = _hyper_parameters(path, options.trust)
    with _seeded(options.seed):
        # the name may also be that of a module, which was made during the import
        module = imported_object(options.spec)
        if isinstance(module, nn.Module):
            return module, hparams
        return _call_factory(module, hparams, options)


def _hyper_parameters(path: Path | None, trust: bool) -> dict[str, Any]:
    """The arguments that a Lightning checkpoint keeps for the class of its model.

    Args:
        path: The checkpoint; None if none is given.
        trust: Let the file run code.

    Raises:
        LoadError: Where no checkpoint is named, or it has no such arguments.
    """
    content = {} if path is None else weights.read(path, trust)
    hparams = content.get(_HPARAMS) if isinstance(content, Mapping) else None
    if not isinstance(hparams, Mapping) or not hparams:
        subject = "a model without --weights" if path is None else path.name
        raise LoadError(
            f"--model-arg @hparams: {subject} has no dict of {_HPARAMS}",
            "--weights names a Lightning checkpoint; or NAME=VALUE for each",
        )
    hparams = {str(name): value for name, value in hparams.items()}
    # hparams_name is the argument that takes them all as one dict; `kwargs` means that each
    # is an argument of its own
    name = content.get("hparams_name")
    if isinstance(name, str) and name not in ("", "kwargs"):
        return {name: hparams}
    return hparams


def _call_factory(
    factory: Any, hparams: dict[str, Any], options: ModelOptions
) -> tuple[nn.Module, dict[str, Any]]:
    """Call a factory. Returns the model, and the hyper-parameters with which the factory was
    called.

    Args:
        factory: The function or class that `options.spec` names.
        hparams: The hyper-parameters of a checkpoint, by name. Those for which the factory
            has no argument are left out.
        options: How the model is loaded: `model_args` are passed to the factory, too, and
            win over `hparams`.

    Raises:
        LoadError: Where the factory is not callable, fails, or makes no module.
        UsageError: Where the factory does not take one of --model-arg.
    """
    spec = options.spec
    if not callable(factory):
        raise LoadError(
            f"{spec} is a {type(factory).__name__}, not a factory",
            "name a function or a class",
        )
    try:
        # Lightning itself leaves out those without an argument
        if hparams and not arguments.takes_any_name(factory):
            names = arguments.argument_names(factory)
            hparams = {name: hparams[name] for name in hparams if name in names}
        module = factory(**{**hparams, **options.model_args})
    except Exception as error:
        message = f"{spec} raised {type(error).__name__}: {error}"
        hint = _missing_arguments_hint(error) or "-v shows the traceback"
        raise _build_error(message, error, options.model_args, hint) from error
    if not isinstance(module, nn.Module):
        raise LoadError(
            f"{spec} gave a {type(module).__name__}, not an nn.Module",
            "return the model",
        )
    return module, hparams
