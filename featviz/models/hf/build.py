"""A model of transformers with tensors that were read before: transformers itself reads no file."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registration

from featviz.errors import LoadError
from featviz.models.hf.config import Config, library, model_class
from featviz.text import listed, quoted

log = logging.getLogger(__name__)

_MARGIN = 64 * 2**20
"""Bytes that a model may have beside four times those of its file."""

_SHOWN = 4
"""Keys that an error names before it says how many more there are."""


class _TooLargeError(LoadError):
    """The model would be larger than its weights say."""


def build(
    config: Config, tensors: Mapping[str, Tensor], file: str, partial: bool, seed: int
) -> nn.Module:
    """Make the model that a config names of these tensors.

    Args:
        file: the name of the file of weights, for messages.
        partial: leave random what the file lacks or has in another shape.
        seed: seeds what stays random.

    Raises:
        LoadError: transformers is not installed or has no such model, the config cannot be built,
            asks for more than the weights are, or the weights do not fit it.
    """
    kind = model_class(config)
    with _bounded(config, tensors), _quiet(config), torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        try:
            module, info = _from_tensors(kind, config, tensors, partial)
        except _TooLargeError:
            raise
        except Exception as error:  # whatever the constructors of a class make of a bad config
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise LoadError(
                f"{config.architecture} could not be built of {quoted(config.words)} and {file}: "
                f"{quoted(line)}",
                "is it the config of these weights? --partial loads what fits",
            ) from error
    _report(config, info, file, partial)
    return module


def _from_tensors(
    kind: Any, config: Config, tensors: Mapping[str, Tensor], partial: bool
) -> tuple[nn.Module, Mapping[str, Any]]:
    """What `from_pretrained` makes of a config and tensors; given both, it opens no file.

    `attn_implementation` is `eager` unless asked for otherwise: attention weights can then be seen.
    """
    fields = dict(config.fields)
    attention = fields.pop("attn_implementation", "eager")
    made = kind.config_class.from_dict(fields)
    pair: tuple[nn.Module, Mapping[str, Any]] = kind.from_pretrained(
        None,
        config=made,
        state_dict=dict(tensors),
        attn_implementation=attention,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=partial,
        output_loading_info=True,
    )
    return pair


def _report(config: Config, info: Mapping[str, Any], file: str, partial: bool) -> None:
    """Say which tensors did not go in.

    Raises:
        LoadError: some of the model's are missing or of another shape, without --partial.
    """
    missing = [str(key) for key in sorted(info.get("missing_keys", ()))]
    other = [str(key[0]) for key in sorted(info.get("mismatched_keys", ()))]
    parts = [
        f"{word} {listed([quoted(key) for key in keys], _SHOWN)}"
        for word, keys in (("missing", missing), ("of another shape", other))
        if keys
    ]
    words = f"{file} does not fit {config.architecture}: {'; '.join(parts)}"
    if parts and not partial:
        raise LoadError(words, "the config of these weights, or --partial for what fits")
    if parts:
        log.warning("%s (--partial: these are random)", words)
    if unused := [quoted(str(key)) for key in sorted(info.get("unexpected_keys", ()))]:
        log.warning("%s has no use for %s", config.architecture, listed(unused, _SHOWN))


@contextmanager
def _bounded(config: Config, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Stop a model in the making that grows beyond its weights.

    transformers makes it on the meta device, where a tensor has no data, so the sizes that a config
    asks for are known before anything is allocated.
    """
    most = 4 * sum(tensor.nbytes for tensor in tensors.values()) + _MARGIN
    parts = 100 * len(tensors) + 10_000
    used, made = 0, 0

    def count(module: nn.Module, name: str, item: Any) -> None:
        nonlocal used, made
        made += 1
        if isinstance(item, Tensor) and item.is_meta:
            used += item.nbytes
        if used > most or made > parts:
            raise _TooLargeError(
                f"{quoted(config.words)} asks for a larger model than its weights: "
                + (f"more than {parts:,} parts" if made > parts else f"{used:,} bytes")
                + f" for {len(tensors):,} tensors",
                "is it the config of these weights?",
            )

    hooks = [
        registration.register_module_parameter_registration_hook(count),
        registration.register_module_buffer_registration_hook(count),
        registration.register_module_module_registration_hook(count),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _quiet(config: Config) -> Iterator[None]:
    """transformers without progress bars, warnings and connections."""
    words = library(config).utils.logging
    hub: Any = import_module("huggingface_hub.constants")
    offline, hub.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE, True
    level, bars = words.get_verbosity(), words.is_progress_bar_enabled()
    words.set_verbosity_error()
    words.disable_progress_bar()
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = offline
        words.set_verbosity(level)
        if bars:
            words.enable_progress_bar()
