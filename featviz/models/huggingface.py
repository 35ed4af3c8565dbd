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
from featviz.models.sources import FixedInput, Loaded, download_hint, load_source
from featviz.options import ModelOptions
from featviz.text import first_line, listed, quoted

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

_LEFT_OUT = re.compile(
    r"_?(attn|experts)_implementation\w*|(torch_)?dtype|fusion_config|transformers_weights"
)
"""Keys of a config that say how to load and compute, not what the model is."""


class ImageTower(nn.Module):
    """The part of a dual encoder (CLIP) that takes images; its modules keep their names."""

    def __init__(self, whole: nn.Module) -> None:
        """Take the modules of a model of transformers that has `get_image_features`."""
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
    """Load the model of a folder, by transformers or by timm, with its weights or those of
    a file.

    Raises:
        UsageError: Where there is no such folder or file of weights.
        LoadError: Where the config names no model that can be loaded, or its weights
            are missing or do not fit.
    """
    folder = Path(options.spec.removeprefix("hf:"))
    if not folder.is_dir():
        raise UsageError(f"no folder {str(folder)!r}", download_hint(str(folder)))
    path = _weights_file(folder, options.weights)
    # folders of timm have a config.json as well, which names its architecture otherwise
    architecture = architecture_beside(folder / _FILE) or ""
    if architecture.startswith("timm:") and path is not None:
        by_timm = structs.replace(
            options, spec=str(path), weights=None, arch=architecture
        )
        loaded = load_source(by_timm)
        return loaded._replace(record={**loaded.record, "kind": "huggingface"})
    config = _read_config(folder)
    file = quoted(folder / _FILE)
    if not architecture or architecture.startswith("timm:"):
        raise LoadError(
            f"{file} names no architecture of transformers",
            "give the file of weights, and --arch file.py:factory or timm:NAME",
        )
    config = _without_loading_keys(config, file, architecture) | options.model_args
    if path is None:
        raise LoadError(
            f"{folder} has no weights: none of {', '.join(_WEIGHTS)}",
            "--weights FILE names them",
        )
    return _load_architecture(architecture, config, folder, path, options)


def _load_architecture(
    architecture: str,
    config: dict[str, Any],
    folder: Path,
    path: Path,
    options: ModelOptions,
) -> Loaded:
    """Load a model of transformers.

    Args:
        architecture: The name of its class.
        config: What config.json says of it, with the user's --model-arg.
        folder: The model's, which may have settings of an image processor.
        path: The file of weights.
        options: How the model is loaded.

    Raises:
        LoadError: Where the weights cannot be read or do not fit, the class cannot be
            built, or takes no image.
    """
    state_dict = weights.read_weights(path, options)
    file = quoted(folder / _FILE)
    tensors = state_dict.tensors
    module = _build(file, architecture, config, path.name, tensors, options)
    log.info("%s: %s", folder.name, architecture)
    record: dict[str, Any] = {
        "kind": "huggingface",
        "name": folder.resolve().name,
        "arch": architecture,
        **weights.record(path),
    }
    if state_dict.steps:
        record["taken"] = list(state_dict.steps)
    return Loaded(
        _taking_images(module, architecture),
        record,
        entry=from_transformers(folder, config),
        input=FixedInput(size=image_size(config)),
    )


def _taking_images(module: nn.Module, architecture: str) -> nn.Module:
    """The module if its forward takes an image first, or else its vision tower.

    Args:
        module: A model of transformers.
        architecture: The name of its class, for messages.

    Raises:
        LoadError: Where it has no vision tower either.
    """
    first = next(iter(inspect.signature(module.forward).parameters))
    if first == _IMAGE:
        return module
    if not hasattr(module, "vision_model"):
        raise _no_image(architecture, first)
    log.info("%s is run by its vision tower (get_image_features)", architecture)
    return ImageTower(module)


def _weights_file(folder: Path, chosen: str | None) -> Path | None:
    """The file that the user names, or the first of a folder's; None where there is
    none.

    Raises:
        UsageError: Where the user names a file that is not there.
    """
    if chosen is not None:
        if not Path(chosen).is_file():
            raise UsageError(f"--weights {chosen!r} is no file", "give a file")
        return Path(chosen)
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    return None


def _read_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json.

    Raises:
        LoadError: Where it is missing or cannot be read.
    """
    name = quoted(folder)
    try:
        config: dict[str, Any] = read_json(folder / _FILE)
    except FileNotFoundError as error:
        # of LoRA and its like: a few matrices beside a model that lies elsewhere
        if (folder / _ADAPTER_FILE).is_file():
            raise LoadError(
                f"{name} holds an adapter, which is no model by itself",
                "merge it with its model by peft:"
                " model.merge_and_unload().save_pretrained('DIR'); MODEL is DIR",
            ) from error
        raise LoadError(
            f"{name} is no folder of a Hugging Face model: it lacks {_FILE}",
            "give a file of weights and its architecture: FILE --arch MODEL",
        ) from error
    except FileError as error:
        raise LoadError(str(error), "fetch the file again") from error
    return config


def _build(
    config_file: str,
    name: str,
    fields: dict[str, Any],
    weights_file: str,
    tensors: dict[str, Tensor],
    options: ModelOptions,
) -> nn.Module:
    """Build a model of transformers.

    Args:
        config_file: For messages.
        name: The class that the config names.
        fields: Of the config, without those that say how to load; loses
            `attn_implementation`.
        weights_file: For messages.
        tensors: Its weights, by name.
        options: How the model is loaded: `seed`, of the weights that are missing, and
            `partial`.

    Raises:
        LoadError: Where transformers is not installed, has no such class of models for
            images, or the config does not fit the class or the weights.
    """
    # eager, so that the weights of attention can be seen
    attention = str(fields.pop("attn_implementation", "eager"))
    try:
        library = import_module("transformers")
    except ImportError as error:
        raise LoadError(
            f"{quoted(name)} is a model of the package transformers: {error}",
            "pip install 'featviz[hf]'",
        ) from error
    model_class = _model_class(config_file, name, library)
    with _quiet(library), torch.random.fork_rng(devices=()):
        torch.manual_seed(options.seed)
        try:
            config = model_class.config_class.from_dict(fields)
            _check_parts(config, config_file, library.PreTrainedConfig)
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
            raise LoadError(
                f"{name} could not be built of {config_file} and {weights_file}:"
                f" {quoted(first_line(error))}",
                "is it the config of these weights? --partial loads what fits",
            ) from error
    _check_fit(name, weights_file, info, options.partial)
    return module  # type: ignore[no-any-return]


def _check_fit(name: str, file: str, info: dict[str, Any], partial: bool) -> None:
    """Refuse weights that do not fit a model, with LoadError, or with --partial warn of
    them. Weights that the model has no use for get a warning.

    Args:
        name: The class of the model.
        file: That of the weights.
        info: What `from_pretrained` says of the loading.
        partial: Whether the user wants what fits.
    """
    # from_pretrained fills both with random numbers, and only warns
    unfit = [*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])]
    message = f"{file} does not fit {name}: missing or of another shape: {_first_names(unfit)}"
    if unfit and not partial:
        raise LoadError(
            message, "the config of these weights, or --partial for what fits"
        )
    if unfit:
        log.warning("%s (--partial: these are random)", message)
    if info["unexpected_keys"]:
        log.warning("%s has no use for %s", name, _first_names(info["unexpected_keys"]))


def _without_loading_keys(value: Any, file: str, architecture: str) -> Any:
    """A value of a config without the keys of _LEFT_OUT, at every depth.

    Args:
        value: The config, or something in it.
        file: The config's, for messages.
        architecture: The class that the config names, for messages.

    Raises:
        LoadError: Where it asks for code of its own, or is of quantised weights.
    """
    if isinstance(value, list):
        return [_without_loading_keys(item, file, architecture) for item in value]
    if not isinstance(value, dict):
        return value
    # names Python files of the folder, which the Auto classes would import
    if value.get("auto_map"):
        raise LoadError(
            f"{file} wants code of its own to run (auto_map)",
            "if you trust it: --arch file.py:factory, which loads it",
        )
    if value.get("quantization_config"):
        raise LoadError(
            f"{file} says that the weights of {quoted(architecture)} are quantised",
            "save the model that they were made from, in float",
        )
    return {
        key: _without_loading_keys(item, file, architecture)
        for key, item in value.items()
        if not _LEFT_OUT.fullmatch(key)
    }


def _model_class(config_file: str, name: str, library: Any) -> Any:
    """The class that a config names.

    Args:
        config_file: For messages.
        name: The class's, as the config has it.
        library: transformers, imported.

    Raises:
        LoadError: Where transformers itself has no such model, the class only wraps a
            model of timm's, or its model takes no image.
    """
    model_class: Any = None
    try:
        model_class = getattr(library, name, None) if name.isidentifier() else None
    except Exception:  # a model whose own requirements are not installed
        log.debug("%s cannot be imported", name, exc_info=True)
    if not _is_model_of(library, model_class):
        version = library.__version__
        raise LoadError(
            f"{config_file} names {quoted(name)}, which is no model of transformers"
            f" {version}",
            "pip install --upgrade transformers; a model of timm's is --arch timm:NAME",
        )
    first = list(inspect.signature(model_class.forward).parameters)[1]
    if first != _IMAGE and not hasattr(model_class, "get_image_features"):
        raise _no_image(name, first)
    return model_class


def _is_model_of(library: Any, value: Any) -> bool:
    """Whether a value is a class of a model that transformers itself defines."""
    if not isinstance(value, type) or not issubclass(value, library.PreTrainedModel):
        return False
    module = value.__module__
    is_own = module.startswith("transformers.models.") and "timm" not in module
    return is_own and getattr(value, "config_class", None) is not None


def _no_image(name: str, first: str) -> LoadError:
    """The error for a model whose forward takes an argument named `first` before an
    image."""
    return LoadError(
        f"{name} takes {first} first, and featviz gives it an image",
        f"a model whose forward begins with {_IMAGE}; or --arch file.py:factory"
        " that wraps it",
    )


def _check_parts(value: Any, file: str, config_class: type) -> None:
    """Refuse, with LoadError, what a configuration, or one in it at any depth, would fetch,
    or have timm build in a way of its own.

    Args:
        value: A configuration, or a dict, list or tuple in it.
        file: The config's, for messages.
        config_class: The base class of all configurations of transformers.
    """
    if isinstance(value, config_class):
        # timm takes `hf-hub:` and `local-dir:` names there, which fetch, or open other
        # folders
        for key in ("architecture", "backbone"):
            name = str(getattr(value, key, ""))
            if ":" in name:
                raise LoadError(
                    f"{file} names a backbone elsewhere: {quoted(name)}",
                    "a folder that names one of transformers, or a plain one of timm",
                )
        if getattr(value, "model_args", None):
            raise LoadError(f"{file} gives timm arguments of its own (model_args)")
        value = vars(value)
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (config_class, dict, list, tuple)):
            _check_parts(item, file, config_class)


def _first_names(keys: Iterable[str]) -> str:
    """The first names of tensors, for a message."""
    return listed([quoted(key) for key in sorted(keys)], 4)


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """In the context, transformers shows no progress bars and warnings, and its hub makes
    no connections.

    Args:
        library: transformers, imported.
    """
    messages = library.utils.logging
    hub: Any = import_module("huggingface_hub.constants")
    was_offline = hub.HF_HUB_OFFLINE
    # these settings are of the whole process, so they go back afterwards
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
