"""Models by name: torchvision's, and timm's (extra `featviz[timm]`)."""

from __future__ import annotations

import inspect
import logging
import pickle
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import URLError
from urllib.parse import urlparse

import torch
from torch import Tensor, nn

from featviz.errors import FileError, LoadError, UsageError
from featviz.files import read_json
from featviz.models.preprocess import Chain
from featviz.models.presets import from_timm
from featviz.models.requirements import first_line, require_torchvision
from featviz.models.sources import ANY, Loaded, unknown_name
from featviz.models.weights import put_weights, read_weights, stripped_forms
from featviz.options import ModelOptions

log = logging.getLogger(__name__)

_HUB_FILES = ("model.safetensors", "pytorch_model.bin")


def load_torchvision(options: ModelOptions) -> Loaded:
    """Build the model with the weights of torchvision, of a file, or random ones."""
    return _loaded(options, "torchvision", build_torchvision)


def load_timm(options: ModelOptions) -> Loaded:
    """Build the model with the weights of timm, of a file, or random ones. A file says how many
    classes and channels the model has."""
    return _loaded(options, "timm", _build_timm)


def _loaded(options: ModelOptions, kind: str, build: Callable[..., Any]) -> Loaded:
    name, weights = options.spec.removeprefix(f"{kind}:"), options.weights or "default"
    source: dict[str, Any] = {"kind": kind, "name": name}
    path, seed = Path(weights), options.seed
    if path.is_file():
        tensors = read_weights(path, options)
        forms = [form.tensors for form in stripped_forms(tensors)] if kind == "timm" else []
        arguments = _arguments_of(name, forms) if forms else {}
        module, entry = build(name, None, seed, {**arguments, **options.model_args})
        record = put_weights(module, tensors, path, options)
        return module, {**source, **arguments, **record}, entry, ANY
    module, entry = build(name, weights, seed, options.model_args)
    source["weights"] = weights
    if weights == "none":
        log.warning("%s has random weights (--weights none, --seed %d)", name, seed)
        source["seed"] = seed
    return module, source, entry, ANY


def build_torchvision(
    name: str, weights: str | None, seed: int, arguments: Mapping[str, Any]
) -> tuple[nn.Module, Any]:
    """Build a torchvision model with weights `default`, an entry's name, or `none` or None for
    random ones; returns the module and the entry whose transforms fit it."""
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
            raise UsageError(
                f"--weights {weights!r} is neither a file nor an entry of {name}",
                f"one of default, none, {', '.join(entries.__members__)}",
            )
        entry = entries[weights]
    quiet: dict[str, Any] = {"weights": entry, "progress": sys.stderr.isatty()}
    parameters = inspect.signature(models.get_model_builder(name)).parameters
    if entry is None and "weights_backbone" in parameters.keys() - arguments.keys():
        quiet["weights_backbone"] = None
    try:
        with torch.random.fork_rng(devices=()), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # how inception and googlenet initialise
            torch.manual_seed(seed)
            module: nn.Module = models.get_model(name, **quiet, **arguments)
    except (TypeError, ValueError) as error:
        message = f"torchvision's {name} refused its arguments: {error}"
        raise LoadError(message, "see --model-arg") from error
    except (OSError, EOFError, pickle.UnpicklingError, RuntimeError) as error:
        if entry is None:
            raise
        file = Path(urlparse(entry.url).path).name
        raise LoadError(
            f"the weights {entry} could not be loaded: {error}",
            f"put {file} into {Path(torch.hub.get_dir()) / 'checkpoints'}, "
            "or use --weights none for random ones",
        ) from error
    return module, entry or default


def architecture_beside(path: Path) -> str | None:
    """What a `config.json` beside a file of weights names: `timm:NAME` as timm's hub has it, a
    class of transformers, or None."""
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
    """Build a timm model, `resnet18` or with a tag `resnet18.a1_in1k`, with weights `default`
    (those of the tag, else timm's first), a tag, or `none` or None for random ones."""
    timm = _timm()
    full = _tagged(timm, name, weights)
    config, pretrained = timm.get_pretrained_cfg(full), weights not in (None, "none")
    overlay: dict[str, Any] = {}
    if pretrained:
        if config is None or not config.has_weights:
            raise UsageError(f"timm has no weights for {full}", "--weights none, or a file")
        if config.hf_hub_id:  # the hub's own client asks for a minute before it looks here
            from huggingface_hub import try_to_load_from_cache

            files = [config.hf_hub_filename] if config.hf_hub_filename else _HUB_FILES
            found = [try_to_load_from_cache(config.hf_hub_id, file) for file in files]
            if here := [file for file in found if isinstance(file, str)]:
                overlay = {"pretrained_cfg_overlay": {"file": here[0]}}
        asked = arguments.get("num_classes", config.num_classes)
        if asked not in (0, config.num_classes):
            words = "the classifier of %s is random: its weights have %d classes, not %s"
            log.warning(words, full, config.num_classes, asked)
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            module = timm.create_model(full, pretrained=pretrained, **{**overlay, **arguments})
    except (URLError, OSError, EOFError) as error:
        file = f"{config.hf_hub_id} {config.hf_hub_filename or _HUB_FILES[0]}"
        place = f"`hf download {file}` elsewhere" if config.hf_hub_id else f"fetch {config.url}"
        raise LoadError(
            f"the weights of {full} could not be loaded: {first_line(error)}",
            f"{place} for --weights FILE; or use --weights none for random ones",
        ) from error
    except (TypeError, ValueError, RuntimeError, AssertionError, KeyError) as error:
        words = f"timm could not build {full}: {first_line(error)}"
        raise LoadError(words, "see --model-arg") from error
    prepared = timm.data.resolve_model_data_config(module)
    channels = int(arguments.get("in_chans", prepared["input_size"][0]))
    size = arguments.get("img_size", prepared["input_size"][1:])
    height, width = (size, size) if isinstance(size, int) else size
    return module, from_timm({**prepared, "input_size": (channels, height, width)})


def _arguments_of(name: str, forms: Sequence[Mapping[str, Tensor]]) -> dict[str, int]:
    """Read `num_classes` and `in_chans` off the weights of a file, where they are not the default,
    from the tensors as they are, or with prefixes taken away."""
    timm = _timm()
    config = timm.get_pretrained_cfg(_tagged(timm, name, None))
    arguments = {}
    for argument, layer, axis, default in (
        ("num_classes", config.classifier, 0, config.num_classes),
        ("in_chans", config.first_conv, 1, config.input_size[0]),
    ):
        layer = layer[0] if isinstance(layer, (tuple, list)) and layer else layer
        sizes = [form[f"{layer}.weight"].shape for form in forms if f"{layer}.weight" in form]
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
