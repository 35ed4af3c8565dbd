"""Models by name: torchvision's, and timm's (extra `featviz[timm]`)."""

from __future__ import annotations

import difflib
import inspect
import logging
import pickle
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import URLError
from urllib.parse import urlparse
from urllib.request import getproxies

import torch
from torch import Tensor, nn

from featviz.errors import FeatvizError, FileError, LoadError, UsageError
from featviz.files import read_json
from featviz.models.files.state_dict import stripped_forms
from featviz.models.preprocess import Chain
from featviz.models.presets import from_timm
from featviz.models.requirements import require_torchvision
from featviz.models.sources import Loaded, no_builder
from featviz.models.weights import put_weights, read_weights
from featviz.options import ModelOptions

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 3.0
"""How long the hub may take to answer; its own client tries for most of a minute."""

_HUB_FILES = ("model.safetensors", "pytorch_model.bin")
"""What timm looks for in a repository of the hub, in this order."""


def load_torchvision(options: ModelOptions) -> Loaded:
    """Build the model with the weights of torchvision, of a file, or random ones.

    Raises:
        UsageError: no such model or entry.
        LoadError: the weights cannot be had, or do not fit.
    """
    name = options.spec.removeprefix("torchvision:")
    weights = options.weights or "default"
    source = {"kind": "torchvision", "name": name}
    if Path(weights).is_file():
        path = Path(weights)
        module, entry = build_torchvision(name, None, options.seed, options.model_args)
        record = put_weights(module, read_weights(path, options), path, options)
        return Loaded(module, entry, {**source, **record})
    module, entry = build_torchvision(name, weights, options.seed, options.model_args)
    seed = {"seed": options.seed} if weights == "none" else {}
    return Loaded(module, entry, {**source, "weights": weights, **seed})


def build_torchvision(
    name: str, weights: str | None, seed: int, arguments: Mapping[str, Any]
) -> tuple[nn.Module, Any]:
    """Build a torchvision model.

    Args:
        weights: `default`, an entry's name, `none` for random ones (with a warning), or None for
            random ones that the caller replaces.

    Returns:
        The module, and the weights entry whose transforms fit it (None where there is none).

    Raises:
        UsageError: no such model or entry.
        LoadError: the weights cannot be had, or the builder refuses its arguments.
    """
    known = _entry(name, weights)
    entry = known if weights not in (None, "none") else None
    if weights == "none":
        log.warning("%s has random weights (--weights none, --seed %d)", name, seed)
    models = _torchvision()
    quiet: dict[str, Any] = {"weights": entry, "progress": sys.stderr.isatty()}
    parameters = inspect.signature(models.get_model_builder(name)).parameters
    if entry is None and "weights_backbone" in parameters.keys() - arguments.keys():
        quiet["weights_backbone"] = None
    try:
        with torch.random.fork_rng(devices=()), warnings.catch_warnings():
            # about how inception and googlenet initialise; nothing that a user here could act on
            warnings.simplefilter("ignore", FutureWarning)
            torch.manual_seed(seed)
            module: nn.Module = models.get_model(name, **quiet, **arguments)
    except (TypeError, ValueError) as error:
        raise LoadError(
            f"torchvision's {name} refused its arguments: {error}", "see --model-arg"
        ) from error
    except (OSError, EOFError, pickle.UnpicklingError, RuntimeError) as error:
        if entry is None and isinstance(error, RuntimeError):
            raise
        raise _not_downloaded(name, entry, error) from error
    return module, known


def _not_downloaded(name: str, entry: Any, error: Exception) -> FeatvizError:
    if entry is None:
        return LoadError(f"torchvision's {name} could not be built: {error}")
    file = Path(urlparse(entry.url).path).name
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    return LoadError(
        f"the weights {entry} could not be loaded: {error}",
        f"put {file} into {folder}, or use --weights none for random ones",
    )


def _torchvision() -> Any:
    """torchvision.models."""
    require_torchvision()
    from torchvision import models

    return models


def _entry(name: str, weights: str | None) -> Any:
    """The entry of torchvision's weights, or the default one; None where there is none."""
    models = _torchvision()
    if name not in models.list_models():
        raise no_builder(name, models.list_models())
    entries = models.get_model_weights(name)
    if weights == "default" and not len(entries):
        raise UsageError(f"torchvision has no weights for {name}", "--weights none, or a file")
    if weights in (None, "none", "default"):
        return getattr(entries, "DEFAULT", None)
    if str(weights) in entries.__members__:
        return entries[str(weights)]
    raise UsageError(
        f"--weights {weights!r} is neither a file nor an entry of {name}",
        f"one of default, none, {', '.join(entries.__members__)}",
    )


def load_timm(options: ModelOptions) -> Loaded:
    """Build the model with the weights of timm, of a file, or random ones. A file says how many
    classes and channels the model has.

    Raises:
        UsageError: no such model or tag.
        LoadError: timm is not installed, or the weights cannot be had, or do not fit.
    """
    name = options.spec.removeprefix("timm:")
    weights = options.weights or "default"
    source = {"kind": "timm", "name": name}
    if not Path(weights).is_file():
        module, chain = _build_timm(name, weights, options.seed, options.model_args)
        seed = {"seed": options.seed} if weights == "none" else {}
        return Loaded(module, chain, {**source, "weights": weights, **seed})
    path = Path(weights)
    tensors = read_weights(path, options)
    read = _arguments_of(name, [form.tensors for form in stripped_forms(tensors)])
    module, chain = _build_timm(name, None, options.seed, {**read, **options.model_args})
    record = put_weights(module, tensors, path, options)
    return Loaded(module, chain, {**source, **read, **record})


def timm_name_beside(path: Path) -> str | None:
    """The timm model that a `config.json` beside a file of weights names, as timm's hub has it."""
    try:
        config = read_json(path.with_name("config.json"))
        arch, tag = config["architecture"], config.get("pretrained_cfg", {}).get("tag", "")
        timm = _timm()
    except FileError as error:
        log.warning("%s; %s is loaded without it", error.message, path.name)
        return None
    except (FileNotFoundError, KeyError, TypeError, AttributeError, LoadError):
        return None
    if not isinstance(arch, str) or not timm.is_model(arch):
        return None
    return f"{arch}.{tag}" if tag in _tags(timm, arch) else arch


def _build_timm(
    name: str, weights: str | None, seed: int, arguments: Mapping[str, Any]
) -> tuple[nn.Module, Chain]:
    """Build a timm model.

    Args:
        name: `resnet18`, or with a tag of its weights, `resnet18.a1_in1k`.
        weights: `default` (those of the tag, else timm's first), a tag, `none` for random ones
            (with a warning), or None for random ones that the caller replaces.
        arguments: for `timm.create_model`: num_classes, in_chans, img_size, ...
    """
    timm = _timm()
    full = _tagged(timm, name, weights)
    config = timm.get_pretrained_cfg(full)
    overlay: dict[str, Any] = {}
    if weights == "none":
        log.warning("%s has random weights (--weights none, --seed %d)", name, seed)
    elif weights is not None:
        overlay = _where_weights_are(config, full)
        asked = arguments.get("num_classes", config.num_classes)
        if asked not in (0, config.num_classes):
            words = "the classifier of %s is random: its weights have %d classes, not %s"
            log.warning(words, full, config.num_classes, asked)
    pretrained = weights not in (None, "none")
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            module = timm.create_model(full, pretrained=pretrained, **{**overlay, **arguments})
    except (URLError, OSError, EOFError) as error:
        raise _not_loaded(config, full, str(error)) from error
    except (TypeError, ValueError, RuntimeError, AssertionError, KeyError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise LoadError(f"timm could not build {full}: {line}", "see --model-arg") from error
    prepared = timm.data.resolve_model_data_config(module)
    channels = int(arguments.get("in_chans", prepared["input_size"][0]))
    size = arguments.get("img_size", prepared["input_size"][1:])
    height, width = (size, size) if isinstance(size, int) else size
    return module, from_timm({**prepared, "input_size": (channels, height, width)})


def _arguments_of(name: str, forms: Sequence[Mapping[str, Tensor]]) -> dict[str, int]:
    """Read `num_classes` and `in_chans` off the weights of a file, where they are not the default.

    Args:
        name: the model.
        forms: the tensors as they are, then with prefixes taken away.
    """
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
        import timm
    except ImportError as error:
        raise LoadError(
            f"timm:NAME needs the package timm: {error}", "pip install 'featviz[timm]'"
        ) from error
    module: ModuleType = timm
    return module


def _tagged(timm: ModuleType, name: str, weights: str | None) -> str:
    """The model's name with the tag that was asked for."""
    arch, _, tag = name.partition(".")
    if "/" in name or not timm.is_model(arch):
        close = difflib.get_close_matches(arch.lower(), timm.list_models(), 3)
        raise UsageError(
            f"timm has no model {name!r}",
            f"did you mean {', '.join(f'timm:{c}' for c in close)}?" if close else "timm:resnet18",
            replace=(f"timm:{name}", f"timm:{close[0]}") if close else None,
        )
    tags = _tags(timm, arch)
    if weights not in (None, "none", "default"):
        if tag and weights != tag:
            raise UsageError(f"--weights {weights} and timm:{name} differ", "leave one out")
        tag = str(weights)
    if tag and tag not in tags:
        raise UsageError(
            f"{tag!r} is neither a file nor weights that timm has for {arch}",
            f"one of default, none, {', '.join(tags) or 'or a file'}",
        )
    return f"{arch}.{tag}" if tag else arch


def _tags(timm: ModuleType, arch: str) -> list[str]:
    names = timm.models.list_pretrained(f"{arch}.*")
    return [name.partition(".")[2] for name in names if name.partition(".")[0] == arch]


def _where_weights_are(config: Any, name: str) -> dict[str, Any]:
    """Arguments that point timm to weights already on this machine."""
    if config is None or not config.has_weights:
        raise UsageError(f"timm has no weights for {name}", "--weights none, or a file")
    if not config.hf_hub_id:
        return {}
    from huggingface_hub import constants, try_to_load_from_cache

    for file in [config.hf_hub_filename] if config.hf_hub_filename else _HUB_FILES:
        cached = try_to_load_from_cache(config.hf_hub_id, file)
        if isinstance(cached, str):
            return {"pretrained_cfg_overlay": {"file": cached}}
    host = urlparse(constants.ENDPOINT).hostname or ""
    try:
        if constants.HF_HUB_OFFLINE:
            raise OSError
        if not getproxies():
            socket.create_connection((host, 443), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise _not_loaded(config, name, f"no connection to {host}") from error
    return {}


def _not_loaded(config: Any, name: str, why: str) -> LoadError:
    if not config.hf_hub_id:
        file, folder = Path(urlparse(config.url).path).name, Path(torch.hub.get_dir())
        place = f"put {config.url} as {file} into {folder / 'checkpoints'}"
    else:
        from huggingface_hub import constants

        file = config.hf_hub_filename or _HUB_FILES[0]
        place = (
            f"`hf download {config.hf_hub_id}` where there is a connection fills "
            f"{constants.HF_HUB_CACHE}; or fetch {file} of "
            f"{constants.ENDPOINT}/{config.hf_hub_id} and give it as --weights FILE"
        )
    return LoadError(
        f"the weights of {name} could not be loaded: {why.strip().splitlines()[0]}",
        f"{place}; or use --weights none for random ones",
    )
