"""From a MODEL string to a module on its device: files (whole models, programs, weights with the
architecture that they belong to), names of torchvision and timm, and the user's own code."""

from __future__ import annotations

import inspect
import logging
import pickle
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import URLError
from urllib.parse import urlparse

import torch
from msgspec import structs
from torch import nn
from torch.nn.parameter import is_lazy

from featviz.errors import FeatvizError, FileError, LoadError, UsageError
from featviz.files import read_json
from featviz.models import arguments, weights
from featviz.models.arguments import UserTransform
from featviz.models.preprocess import Chain, Preprocess
from featviz.models.presets import (
    choose_preprocess,
    from_timm,
    from_ultralytics,
    required_arguments,
)
from featviz.models.rebuild import UnbuiltModule
from featviz.models.requirements import first_line, pick_device, require_torchvision, unfit
from featviz.models.sources import (
    EXPORTED,
    Loaded,
    code_digest,
    load_source,
    sniff,
    source_of,
    target,
    unknown_name,
)
from featviz.options import InputOptions, ModelOptions
from featviz.text import listed, printable, quoted

log = logging.getLogger(__name__)

_HUB_FILES = ("model.safetensors", "pytorch_model.bin")

_HUB_SECONDS = 4

_HPARAMS = "hyper_parameters"  # where Lightning keeps the arguments of a class


@dataclass(frozen=True)
class LoadedModel:
    """A module on its device, and how to feed it."""

    module: nn.Module
    preprocess: Preprocess
    device: torch.device
    source: Mapping[str, Any]
    """For run.json; no absolute path."""
    categories: tuple[str, ...] = ()
    scores: str | None = ""
    """The output's key with scores of classes; empty for itself, None where there are none."""


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
            raise _without_values(name)
    with weights.one_line(Path(options.spec)):
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
        preprocess = transform.preprocess(inputs.input_channels or 3)
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
    _refuse_lazy(module)
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if named and all(tensor.is_meta for tensor in named.values()):  # of some, kernels are drawn
        raise _without_values(next(iter(named)))
    tensor = next(iter(named.values()), torch.empty(0))
    source = {"kind": "module", "type": type(module).__name__, "parameters": weights.digest(module)}
    preprocess = choose_preprocess(module, None, inputs)
    scores, names = _classes(module)
    return LoadedModel(module, preprocess, tensor.device, source, names, scores)


def _without_values(name: str) -> LoadError:
    message = f"the model's {name} is on the device meta, where tensors have no values"
    return LoadError(message, "model.to_empty(device='cpu') where it is built, and weights")


def _refuse_lazy(model: nn.Module) -> None:
    """Refuse a caller's module that gets sizes from its first input, since it could not be given
    back as it was."""
    for name, module in model.named_modules():
        if any(map(is_lazy, module.parameters(recurse=False))):
            label = f"{name} ({type(module).__name__})" if name else type(module).__name__
            message = f"the model's {label} gets its size from the first input, and saw none"
            raise UsageError(message, "run the model on an input of yours first: model(x)")


@contextmanager
def fed(
    model: LoadedModel,
    inputs: InputOptions,
    transform: UserTransform | None,
    further: Mapping[str, Any],
) -> Iterator[LoadedModel]:
    """The model with a function of the caller's as its preprocessing, or with further arguments for
    its forward; the hooks are removed at the end."""
    preprocess = model.preprocess
    if transform is not None:
        preprocess = transform.preprocess(inputs.input_channels or 3)
    values = arguments.from_values(further)
    if preprocess.transform is None:  # each given argument is an image less that forward needs
        count = inputs.images_per_pass or required_arguments(model.module, values)
        preprocess = replace(preprocess, inputs=count)
    preprocess, hooks = arguments.feed(model.module, preprocess, transform, values, model.device)
    try:
        yield replace(model, preprocess=preprocess)
    finally:
        for hook in hooks:
            hook.remove()


def _classes(module: nn.Module) -> tuple[str | None, tuple[str, ...]]:
    """Where the scores of classes are in a model's output, and their names by number."""
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
    """Load a whole model; or weights into `options.arch`, else into what a config.json beside the
    file names, else into the architecture whose tensors they are."""
    with weights.one_line(Path(options.spec)):
        return _load_file(options)


def _load_file(options: ModelOptions) -> Loaded:
    path, arch = Path(options.spec), options.arch
    kind = sniff(path)
    if arch is None and (beside := architecture_beside(path)):
        log.info("%s: config.json beside it says %s", path.name, beside)
        if beside.startswith("timm:"):
            arch = beside
        elif kind != EXPORTED:  # a program is a model of its own
            arch = f"hf:{path.parent}"
    if arch is not None:
        source = source_of(arch, "--arch")
        if source.kind == "file":
            words = f"--arch {arch!r} is a file of its own"
            raise UsageError(words, "give a name or a factory")
        given = structs.replace(options, spec=arch, arch=None, weights=str(path))
        module, record, entry, fixed = load_source(given)
        arch = source.name(arch) if source.kind in ("huggingface", "factory") else arch
        return Loaded(module, {**record, "kind": "file", "arch": arch}, entry, fixed)
    if options.hparams:
        words = f"--model-arg @hparams is for a class of your own, and {path.name} names none"
        raise UsageError(words, "--arch net.py:CLASS names it")
    record = {"kind": "file", **weights.record(path)}
    if kind == EXPORTED:
        program, fixed = weights.read_program(path, options.trust, pick_device(options.device))
        return Loaded(program, record, None, fixed)
    content = weights.read(path, options.trust)
    if isinstance(content, nn.Module) and options.key is None:
        return Loaded(content, record)
    form, whole = weights.unwrap(content, options.key, options.strip_prefix, options.ema, path.name)
    if isinstance(whole, UnbuiltModule):
        raise whole.refusal
    if whole is None:
        return _recognised(path, content, form, options)
    trained = content.get("train_args") if isinstance(content, Mapping) else None
    record = {**record, "taken": list(form.steps)}
    return Loaded(whole, record, from_ultralytics(whole, trained))


def _recognised(path: Path, content: Any, form: weights.Weights, options: ModelOptions) -> Loaded:
    """The architecture of torchvision that the tensors of a file are of."""
    from featviz.models import identify

    known = identify.identify_forms(weights.stripped_forms(form))
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
    module, entry = build_torchvision(name, None, options.seed, built_with)
    tensors, steps = known.form
    log.info("%s: %s", path.name, "; ".join((*steps, known.words)))
    message = f"{path.name} does not fit {name}"
    taken = [*steps, weights.put_into(module, tensors, message, options.partial)]
    record = {"kind": "file", **weights.record(path), "arch": name, **known.arguments}
    return Loaded(module, {**record, "taken": taken}, entry)


# Names of torchvision and timm (extra `featviz[timm]`) ------------------------------------------


def load_torchvision(options: ModelOptions) -> Loaded:
    """Build a model of torchvision or timm with the library's weights, a file's, or random ones."""
    is_timm, name = options.spec.startswith("timm:"), options.spec.rpartition(":")[2]
    build = _build_timm if is_timm else build_torchvision
    source: dict[str, Any] = {"kind": "timm" if is_timm else "torchvision", "name": name}
    wanted, seed = options.weights or "default", options.seed
    path = Path(wanted)
    if path.is_file():
        tensors = weights.read_weights(path, options)
        found = _arguments_of(name, weights.stripped_forms(tensors)) if is_timm else {}
        module, entry = build(name, None, seed, {**found, **options.model_args})
        record = weights.put_weights(module, tensors, path, options)
        return Loaded(module, {**source, **found, **record}, entry)
    module, entry = build(name, wanted, seed, options.model_args)
    source["weights"] = wanted
    if wanted == "none":
        log.warning("%s has random weights (--weights none, --seed %d)", name, seed)
        source["seed"] = seed
    return Loaded(module, source, entry)


load_timm = load_torchvision


@contextmanager
def _random(seed: int) -> Iterator[None]:
    """Random numbers of this seed; those of the caller are left as they are."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        yield


def build_torchvision(
    name: str, weights: str | None, seed: int, arguments: Mapping[str, Any]
) -> tuple[nn.Module, Any]:
    """Build a torchvision model with weights `default`, an entry's name, or `none` or None for
    random ones; returns it and the entry whose transforms fit it."""
    require_torchvision()
    from torchvision import models

    if name not in models.list_models():
        raise unknown_name("torchvision", name, models.list_models())
    entries: Any = models.get_model_weights(name)
    default = getattr(entries, "DEFAULT", None)
    entry = default
    if weights == "default" and default is None:
        raise UsageError(f"torchvision has no weights for {name}", "--weights none, or a file")
    if weights in (None, "none"):
        entry = None
    elif weights != "default":
        if weights not in entries.__members__:
            words = f"--weights {weights!r} is neither a file nor an entry of {name}"
            raise UsageError(words, f"one of default, none, {', '.join(entries.__members__)}")
        entry = entries[weights]
    quiet: dict[str, Any] = {"weights": entry, "progress": sys.stderr.isatty()}
    parameters = inspect.signature(models.get_model_builder(name)).parameters
    if entry is None and "weights_backbone" in parameters.keys() - arguments.keys():
        quiet["weights_backbone"] = None
    try:
        # torch.hub says on stdout what it downloads
        with _random(seed), redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # how inception and googlenet initialise
            module: nn.Module = models.get_model(name, **quiet, **arguments)
    except (TypeError, ValueError) as error:
        message = f"torchvision's {name} refused its arguments: {error}"
        raise LoadError(message, "see --model-arg") from error
    except (OSError, EOFError, pickle.UnpicklingError, RuntimeError) as error:
        if entry is None:
            raise
        file = Path(urlparse(entry.url).path).name
        place = f"put {file} into {Path(torch.hub.get_dir()) / 'checkpoints'}"
        hint = f"{place}, or use --weights none for random ones"
        raise LoadError(f"the weights {entry} could not be loaded: {error}", hint) from error
    return module, entry or default


def architecture_beside(path: Path) -> str | None:
    """What a `config.json` beside weights names: `timm:NAME`, a class of transformers, or None."""
    try:
        config = read_json(path.with_name("config.json"))
    except FileNotFoundError:
        return None
    except FileError as error:
        log.warning("%s; %s is loaded without it", error.message, path.name)
        return None
    config = config if isinstance(config, dict) else {}
    arch, cfg = config.get("architecture"), config.get("pretrained_cfg")
    if isinstance(arch, str):
        with suppress(LoadError):
            timm = _timm()
            if timm.is_model(arch):
                tag = cfg.get("tag", "") if isinstance(cfg, dict) else ""
                return f"timm:{arch}.{tag}" if tag in _tags(timm, arch) else f"timm:{arch}"
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return first if isinstance(first, str) else None


def _build_timm(
    name: str, weights: str | None, seed: int, arguments: Mapping[str, Any]
) -> tuple[nn.Module, Chain]:
    """Build a timm model, `resnet18` or `resnet18.a1_in1k`; weights are `default`, a tag or
    none."""
    timm = _timm()
    full = _tagged(timm, name, weights)
    config, pretrained = timm.get_pretrained_cfg(full), weights not in (None, "none")
    overlay: dict[str, Any] = {}
    asks_hub = False
    if pretrained:
        if config is None or not config.has_weights:
            raise UsageError(f"timm has no weights for {full}", "--weights none, or a file")
        if config.hf_hub_id:  # the hub's own client asks for a minute before it looks here
            from huggingface_hub import try_to_load_from_cache

            files = [config.hf_hub_filename] if config.hf_hub_filename else _HUB_FILES
            found = [try_to_load_from_cache(config.hf_hub_id, file) for file in files]
            if here := [file for file in found if isinstance(file, str)]:
                overlay = {"pretrained_cfg_overlay": {"file": here[0]}}
            asks_hub = not here
        asked = arguments.get("num_classes", config.num_classes)
        if asked not in (0, config.num_classes):
            words = "the classifier of %s is random: its weights have %d classes, not %s"
            log.warning(words, full, config.num_classes, asked)
    try:
        if asks_hub:
            _reach_hub()
        with _random(seed), redirect_stdout(sys.stderr):
            module = timm.create_model(full, pretrained=pretrained, **{**overlay, **arguments})
    except (URLError, OSError, EOFError) as error:
        file = f"{config.hf_hub_id} {config.hf_hub_filename or _HUB_FILES[0]}"
        place = f"`hf download {file}` elsewhere" if config.hf_hub_id else f"fetch {config.url}"
        words = f"the weights of {full} could not be loaded: {first_line(error)}"
        hint = f"{place} for --weights FILE; or use --weights none for random ones"
        raise LoadError(words, hint) from error
    except (TypeError, ValueError, RuntimeError, AssertionError, KeyError) as error:
        words = f"timm could not build {full}: {first_line(error)}"
        raise LoadError(words, "see --model-arg") from error
    prepared = timm.data.resolve_model_data_config(module)
    channels = int(arguments.get("in_chans", prepared["input_size"][0]))
    size = arguments.get("img_size", prepared["input_size"][1:])
    height, width = (size, size) if isinstance(size, int) else size
    return module, from_timm({**prepared, "input_size": (channels, height, width)})


def _reach_hub() -> None:
    """OSError where the hub does not answer at once: its client would try again for a minute."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except Exception as error:  # of either library that the client may use
        raise OSError(f"{constants.ENDPOINT} does not answer: {first_line(error)}") from error


def _arguments_of(name: str, forms: Sequence[weights.Weights]) -> dict[str, int]:
    """`num_classes` and `in_chans` of the weights of a file, where they are not the default."""
    timm = _timm()
    config = timm.get_pretrained_cfg(_tagged(timm, name, None))
    arguments = {}
    for argument, layer, axis, default in (
        ("num_classes", config.classifier, 0, config.num_classes),
        ("in_chans", config.first_conv, 1, config.input_size[0]),
    ):
        layer = layer[0] if isinstance(layer, (tuple, list)) and layer else layer
        key = f"{layer}.weight"
        sizes = [tensors[key].shape for tensors, _ in forms if key in tensors]
        if sizes and len(sizes[-1]) > axis and sizes[-1][axis] != default:
            arguments[argument] = int(sizes[-1][axis])
    return arguments


def _timm() -> ModuleType:
    try:
        return import_module("timm")
    except ImportError as error:
        message = f"timm:NAME needs the package timm: {error}"
        raise LoadError(message, "pip install 'featviz[timm]'") from error


def _tagged(timm: ModuleType, name: str, weights: str | None) -> str:
    arch, _, tag = name.partition(".")
    if "/" in name or not timm.is_model(arch):
        raise unknown_name("timm", name, timm.list_models())
    if weights not in (None, "none", "default"):
        if tag and weights != tag:
            raise UsageError(f"--weights {weights} and timm:{name} differ", "leave one out")
        tag = str(weights)
    tags = _tags(timm, arch)
    if tag and tag not in tags:
        words = f"{tag!r} is neither a file nor weights that timm has for {arch}"
        raise UsageError(words, f"one of default, none, {', '.join(tags) or 'or a file'}")
    return f"{arch}.{tag}" if tag else arch


def _tags(timm: ModuleType, arch: str) -> list[str]:
    names = timm.models.list_pretrained(f"{arch}.*")
    return [name.partition(".")[2] for name in names if name.partition(".")[0] == arch]


# Factories, `pkg.mod:factory` and `file.py:factory` --------------------------------------------


def load_factory(options: ModelOptions) -> Loaded:
    """Call the factory; give the model the weights of a file, if one is named."""
    path = None if options.weights in (None, "none") else Path(str(options.weights))
    if path is not None and not path.is_file():
        raise UsageError(f"no weights file {options.weights!r}", "a factory takes a file, or none")
    hparams: dict[str, Any] = {}
    if options.hparams:
        content: Any = weights.read(path, options.trust) if path is not None else None
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
    with _random(options.seed):
        module = target(spec)
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
    name = source_of(spec).name(spec)
    if options.weights is None and any(True for _ in module.parameters()):
        log.warning("weights as %s makes them; --weights FILE loads yours", name)
    if path is not None:
        tensors = weights.read_weights(path, options)
        record = weights.put_weights(module, tensors, path, options)
    if hparams:
        record[_HPARAMS] = {name: quoted(repr(value)) for name, value in hparams.items()}
    if (digest := code_digest(spec)) is not None:
        record["code_sha256"] = digest
    parameters = weights.digest(module)
    if parameters is not None or path is None:  # else the file's sha256 tells it from others
        record["parameters"] = parameters
    return Loaded(module, {"kind": "factory", "name": name, **record})
