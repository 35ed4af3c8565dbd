"""timm's models by name (extra `featviz[timm]`)."""

from __future__ import annotations

import difflib
import logging
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import URLError
from urllib.parse import urlparse
from urllib.request import getproxies

import torch
from torch import Tensor, nn

from featviz.errors import FileError, LoadError, UsageError
from featviz.files import read_json
from featviz.models.files.state_dict import stripped_forms
from featviz.models.preprocess import Preprocess
from featviz.models.presets import from_timm
from featviz.models.sources import Loaded, ModelOptions
from featviz.models.weights import put_weights, read_weights

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 3.0
"""How long the hub may take to answer; its own client tries for most of a minute."""

_HUB_FILES = ("model.safetensors", "pytorch_model.bin")
"""What timm looks for in a repository of the hub, in this order."""


def load(options: ModelOptions) -> Loaded:
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
        module, preprocess = build(name, weights, options.seed, options.model_args)
        seed = {"seed": options.seed} if weights == "none" else {}
        return Loaded(module, preprocess, {**source, "weights": weights, **seed})
    path = Path(weights)
    tensors = read_weights(path, options)
    read = arguments_of(name, [form.tensors for form in stripped_forms(tensors)])
    module, preprocess = build(name, None, options.seed, {**read, **options.model_args})
    record = put_weights(module, tensors, path, options)
    return Loaded(module, preprocess, {**source, **read, **record})


def check(options: ModelOptions) -> None:
    """Refuse a name or a tag that timm does not have.

    Raises:
        UsageError: names the nearest ones.
        LoadError: timm is not installed.
    """
    weights = options.weights if not Path(options.weights or "").is_file() else None
    _tagged(_timm(), options.spec.removeprefix("timm:"), weights)


def build(
    name: str, weights: str | None, seed: int, arguments: Mapping[str, Any]
) -> tuple[nn.Module, Preprocess]:
    """Build a timm model.

    Args:
        name: `resnet18`, or with a tag of its weights, `resnet18.a1_in1k`.
        weights: `default` (those of the tag, else timm's first), a tag, `none` for random ones
            (with a warning), or None for random ones that the caller replaces.
        arguments: for `timm.create_model`: num_classes, in_chans, img_size, ...

    Raises:
        UsageError: no such model or tag.
        LoadError: timm is not installed, the weights cannot be had, or arguments are refused.
    """
    timm = _timm()
    full = _tagged(timm, name, weights)
    overlay: dict[str, Any] = {}
    if weights == "none":
        log.warning("%s has random weights (--weights none, --seed %d)", name, seed)
    elif weights is not None:
        overlay = _source(timm.get_pretrained_cfg(full), full)
        _warn_of_random_head(timm, full, arguments)
    pretrained = weights not in (None, "none")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        module = _create(timm, full, pretrained, {**overlay, **arguments})
    return module, _preprocess(timm, module, arguments)


def arguments_of(name: str, forms: Sequence[Mapping[str, Tensor]]) -> dict[str, int]:
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


def named_beside(path: Path) -> str | None:
    """The timm model that a `config.json` beside a file of weights names, as timm's hub has it."""
    try:
        config = read_json(path.with_name("config.json"))
        arch, tag = config["architecture"], config.get("pretrained_cfg", {}).get("tag", "")
    except FileNotFoundError:
        return None
    except FileError as error:
        log.warning("%s; %s is loaded without it", error.message, path.name)
        return None
    except (KeyError, TypeError, AttributeError):
        return None
    try:
        timm = _timm()
    except LoadError:
        return None
    if not isinstance(arch, str) or not timm.is_model(arch):
        return None
    return f"{arch}.{tag}" if tag in _tags(timm, arch) else arch


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
    """The model's name with the tag that was asked for.

    Raises:
        UsageError: no such model or tag.
    """
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


def _source(config: Any, name: str) -> dict[str, Any]:
    """Arguments that point timm to weights already on this machine.

    Raises:
        UsageError: timm has no weights for this model.
        LoadError: they are not here, and the hub cannot be reached.
    """
    if config is None or not config.has_weights:
        raise UsageError(f"timm has no weights for {name}", "--weights none, or a file")
    if not config.hf_hub_id:
        return {}
    from huggingface_hub import constants, try_to_load_from_cache

    files = [config.hf_hub_filename] if config.hf_hub_filename else _HUB_FILES
    for file in files:
        cached = try_to_load_from_cache(config.hf_hub_id, file)
        if isinstance(cached, str):
            return {"pretrained_cfg_overlay": {"file": cached}}
    host = urlparse(constants.ENDPOINT).hostname or ""
    if constants.HF_HUB_OFFLINE or not (getproxies() or _answers(host)):
        raise _not_loaded(config, name, f"no connection to {host}")
    return {}


def _answers(host: str) -> bool:
    try:
        with socket.create_connection((host, 443), timeout=_CONNECT_SECONDS):
            return True
    except OSError:
        return False


def _create(
    timm: ModuleType, name: str, pretrained: bool, arguments: Mapping[str, Any]
) -> nn.Module:
    try:
        module: nn.Module = timm.create_model(name, pretrained=pretrained, **arguments)
    except (URLError, OSError, EOFError) as error:
        raise _not_loaded(timm.get_pretrained_cfg(name), name, str(error)) from error
    except (TypeError, ValueError, RuntimeError, AssertionError, KeyError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise LoadError(f"timm could not build {name}: {line}", "see --model-arg") from error
    return module


def _not_loaded(config: Any, name: str, why: str) -> LoadError:
    why = why.strip().splitlines()[0]
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
        f"the weights of {name} could not be loaded: {why}",
        f"{place}; or use --weights none for random ones",
    )


def _warn_of_random_head(timm: ModuleType, name: str, arguments: Mapping[str, Any]) -> None:
    classes = timm.get_pretrained_cfg(name).num_classes
    if arguments.get("num_classes", classes) not in (0, classes):
        log.warning(
            "the classifier of %s is random: its weights have %d classes, not %s",
            name,
            classes,
            arguments["num_classes"],
        )


def _preprocess(timm: ModuleType, module: nn.Module, arguments: Mapping[str, Any]) -> Preprocess:
    config = timm.data.resolve_model_data_config(module)
    channels = int(arguments.get("in_chans", config["input_size"][0]))
    size = arguments.get("img_size", config["input_size"][1:])
    height, width = (size, size) if isinstance(size, int) else size
    return from_timm({**config, "input_size": (channels, height, width)})
