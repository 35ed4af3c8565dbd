"""Folders of models of transformers (extra `featviz[hf]`), which itself reads no file
of theirs."""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn

from featviz.errors import FileError, LoadError, UsageError
from featviz.files import read_json
from featviz.models import weights
from featviz.models.load import architecture_beside
from featviz.models.presets import from_transformers, image_size
from featviz.models.requirements import first_line
from featviz.models.sources import Loaded, download_hint, load_source
from featviz.options import ModelOptions
from featviz.text import listed, quoted

log = logging.getLogger(__name__)

_FILE = "config.json"
_ADAPTER_FILE = "adapter_config.json"
_IMAGE = "pixel_values"

_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

_LEFT_OUT = re.compile(  # how to load and compute, not what the model is
    r"_?(attn|experts)_implementation\w*|(torch_)?dtype|fusion_config|transformers_weights"
)


class ImageTower(nn.Module):
    """The part of a dual encoder that sees images; its modules keep the names they have
    there."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.config = whole.config
        self.training = whole.training
        for name in ("vision_model", "visual_projection"):
            if hasattr(whole, name):
                self.add_module(name, getattr(whole, name))
        self._see: Any = whole.get_image_features

    def forward(self, pixel_values: Tensor) -> Any:
        """The features of an image."""
        return self._see(pixel_values)


def load_huggingface(options: ModelOptions) -> Loaded:
    """Load the model of a folder, with its weights or those of a file."""
    folder = Path(options.spec.removeprefix("hf:"))
    if not folder.is_dir():
        raise UsageError(f"no folder {str(folder)!r}", download_hint(str(folder)))
    if (folder / _ADAPTER_FILE).is_file() and not (folder / _FILE).exists():
        message = f"{quoted(str(folder))} holds an adapter, which is no model by itself"
        hint = (
            "merge it with its model by peft:"
            " model.merge_and_unload().save_pretrained('DIR')"
        )
        raise LoadError(message, f"{hint}; MODEL is DIR")
    path = _weights_file(folder, options.weights)
    architecture = architecture_beside(folder / _FILE)
    if (
        path is not None
        and architecture is not None
        and architecture.startswith("timm:")
    ):
        by_timm = structs.replace(
            options, spec=str(path), weights=None, arch=architecture
        )
        loaded = load_source(by_timm)
        return loaded._replace(record={**loaded.record, "kind": "huggingface"})
    where = quoted(str(folder / _FILE))
    config = _read_config(folder)
    if architecture is None or architecture.startswith("timm:"):
        message = f"{where} names no architecture of transformers"
        hint = "give the file of weights, and --arch file.py:factory or timm:NAME"
        raise LoadError(message, hint)
    config = _checked(config, where, architecture)
    if path is None:
        message = f"{folder} has no weights: none of {', '.join(_WEIGHTS)}"
        raise LoadError(message, "--weights FILE names them")
    state_dict = weights.read_weights(path, options)
    config |= options.model_args
    module = _built(where, architecture, config, path.name, state_dict.tensors, options)
    first = next(iter(inspect.signature(module.forward).parameters))
    if first != _IMAGE:
        if not hasattr(module, "vision_model"):
            raise _no_image(architecture, first)
        log.info("%s is run by its vision tower (get_image_features)", architecture)
        module = ImageTower(module)
    log.info("%s: %s", folder.name, architecture)
    record: dict[str, Any] = {
        "kind": "huggingface",
        "name": folder.resolve().name,
        "arch": architecture,
    }
    record |= weights.record(path)
    if state_dict.steps:
        record["taken"] = list(state_dict.steps)
    return Loaded(
        module, record, from_transformers(folder, config), (None, image_size(config))
    )


def _weights_file(folder: Path, chosen: str | None) -> Path | None:
    """The file that the user names, or the first of a folder's; None where there is
    none."""
    if chosen is not None:
        if not Path(chosen).is_file():
            raise UsageError(f"--weights {chosen!r} is no file", "give a file")
        return Path(chosen)
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    return None


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = read_json(folder / _FILE)
    except FileNotFoundError as error:
        message = (
            f"{quoted(str(folder))} is no folder of a Hugging Face model: it lacks"
            f" {_FILE}"
        )
        hint = "give a file of weights and its architecture: FILE --arch MODEL"
        raise LoadError(message, hint) from error
    except FileError as error:
        raise LoadError(f"{error}", "fetch the file again") from error
    return config


def _built(
    where: str,
    name: str,
    fields: dict[str, Any],
    file: str,
    tensors: Any,
    options: ModelOptions,
) -> nn.Module:
    """The module of a checked config, with the tensors of a file.

    Args:
        where: the config's file, and `file` that of the weights, for messages.
        name: the class that the config names.
        fields: of the config.
    """
    # so that its weights can be seen
    attention = str(fields.pop("attn_implementation", "eager"))
    try:
        library: Any = import_module("transformers")
    except ImportError as error:
        message = f"{quoted(name)} is a model of the package transformers: {error}"
        raise LoadError(message, "pip install 'featviz[hf]'") from error
    model_class = _model_class(where, name, library)
    with _quiet(library), torch.random.fork_rng(devices=()):
        torch.manual_seed(options.seed)
        try:
            config = model_class.config_class.from_dict(dict(fields))
            _check_parts(config, where, library.PreTrainedConfig)
            module, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except LoadError:
            raise
        # whatever the constructors of a class make of a bad config
        except Exception as error:
            reason = quoted(first_line(error))
            message = f"{name} could not be built of {where} and {file}: {reason}"
            hint = "is it the config of these weights? --partial loads what fits"
            raise LoadError(message, hint) from error
    unfit = [*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])]
    message = f"{file} does not fit {name}: missing or of another shape: {_some(unfit)}"
    if unfit and not options.partial:
        raise LoadError(
            message, "the config of these weights, or --partial for what fits"
        )
    if unfit:
        log.warning("%s (--partial: these are random)", message)
    if info["unexpected_keys"]:
        log.warning("%s has no use for %s", name, _some(info["unexpected_keys"]))
    return module  # type: ignore[no-any-return]


def _checked(value: Any, where: str, architecture: str) -> Any:
    """The same values without the keys that say how to load, at every depth."""
    if isinstance(value, list):
        return [_checked(item, where, architecture) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("auto_map"):
        message = f"{where} wants code of its own to run (auto_map)"
        raise LoadError(
            message, "if you trust it: --arch file.py:factory, which loads it"
        )
    if value.get("quantization_config"):
        message = (
            f"{where} says that the weights of {quoted(architecture)} are quantised"
        )
        raise LoadError(message, "save the model that they were made from, in float")
    kept = {key: item for key, item in value.items() if not _LEFT_OUT.fullmatch(key)}
    return {key: _checked(item, where, architecture) for key, item in kept.items()}


def _model_class(where: str, name: str, library: Any) -> Any:
    """The class that a config names: transformers' own, which takes an image, and none
    of timm's."""
    model_class: Any = None
    try:
        model_class = getattr(library, name, None) if name.isidentifier() else None
    except Exception:  # a model whose own requirements are not installed
        log.debug("%s cannot be imported", name, exc_info=True)
    if not _is_model_of(library, model_class):
        message = f"{where} names {quoted(name)}, which is no model of transformers "
        hint = (
            "pip install --upgrade transformers; a model of timm's is --arch timm:NAME"
        )
        raise LoadError(message + library.__version__, hint)
    first = list(inspect.signature(model_class.forward).parameters)[1]
    if first != _IMAGE and not hasattr(model_class, "get_image_features"):
        raise _no_image(name, first)
    return model_class


def _is_model_of(library: Any, value: Any) -> bool:
    """Whether a value is a class of a model that transformers itself defines."""
    if not isinstance(value, type) or not issubclass(value, library.PreTrainedModel):
        return False
    is_own = (
        value.__module__.startswith("transformers.models.")
        and "timm" not in value.__module__
    )
    return is_own and getattr(value, "config_class", None) is not None


def _no_image(name: str, first: str) -> LoadError:
    return LoadError(
        f"{name} takes {first} first, and featviz gives it an image",
        f"a model whose forward begins with {_IMAGE}; or --arch file.py:factory that"
        " wraps it",
    )


def _check_parts(value: Any, where: str, config_class: type) -> None:
    """Refuse what a configuration, or one in it at any depth, would fetch or build
    elsewhere."""
    if isinstance(value, config_class):
        for key in ("architecture", "backbone"):
            name = str(getattr(value, key, ""))
            if ":" in name:
                message = f"{where} names a backbone elsewhere: {quoted(name)}"
                hint = "a folder that names one of transformers, or a plain one of timm"
                raise LoadError(message, hint)
        if getattr(value, "model_args", None):
            raise LoadError(f"{where} gives timm arguments of its own (model_args)")
        value = vars(value)
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (config_class, dict, list, tuple)):
            _check_parts(item, where, config_class)


def _some(keys: Iterable[str]) -> str:
    return listed([quoted(str(key)) for key in sorted(keys)], 4)


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """transformers without progress bars, warnings and connections."""
    messages = library.utils.logging
    hub: Any = import_module("huggingface_hub.constants")
    was_offline = hub.HF_HUB_OFFLINE
    verbosity = messages.get_verbosity()
    had_bars = messages.is_progress_bar_enabled()
    hub.HF_HUB_OFFLINE = True
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hub.HF_HUB_OFFLINE = was_offline
        messages.set_verbosity(verbosity)
        if had_bars:
            messages.enable_progress_bar()
