"""Load models from folders of Hugging Face's format (extra `featviz[hf]`). featviz reads the
files; transformers, which builds the model, reads none."""

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
"""Keys of a config that say how to load or compute the model; all others describe it."""


class ImageTower(nn.Module):
    """The part of a model of images and texts (CLIP) that takes images. Its modules keep their
    names."""

    def __init__(self, whole: nn.Module) -> None:
        """Share the modules of `whole`, a model of transformers with `get_image_features`."""
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
    """Load a model from a folder. Its config.json says whether it is a model of transformers
    or of timm. The weights are those of the folder, or of the file of --weights.

    Raises:
        UsageError: Where the folder or the file of weights does not exist.
        LoadError: Where the config names no model that can be loaded, or the weights are
            missing or do not fit.
    """
    folder = Path(options.spec.removeprefix("hf:"))
    if not folder.is_dir():
        raise UsageError(f"no folder {str(folder)!r}", download_hint(str(folder)))
    path = _weights_file(folder, options.weights)
    # folders of timm have a config.json, too; then this begins with `timm:`
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
        architecture: The name of the model's class.
        config: The content of config.json, changed by the user's --model-arg.
        folder: The folder of the model, which may have settings of an image processor.
        path: The file of weights.
        options: How the model is loaded.

    Raises:
        LoadError: Where the weights cannot be read or do not fit, or the model cannot be
            built or takes no image.
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
        **weights.file_record(path),
    }
    if state_dict.steps:
        record["taken"] = list(state_dict.steps)
    return Loaded(
        _image_module(module, architecture),
        record,
        entry=from_transformers(folder, config),
        input=FixedInput(size=image_size(config)),
    )


def _image_module(module: nn.Module, architecture: str) -> nn.Module:
    """A module whose forward takes an image first: the model itself, or its vision tower.

    Args:
        module: A model of transformers.
        architecture: The name of its class, for messages.

    Raises:
        LoadError: Where the model does not take an image first, and has no vision tower.
    """
    first = next(iter(inspect.signature(module.forward).parameters))
    if first == _IMAGE:
        return module
    if not hasattr(module, "vision_model"):
        raise _no_image_error(architecture, first)
    log.info("%s is run by its vision tower (get_image_features)", architecture)
    return ImageTower(module)


def _weights_file(folder: Path, chosen: str | None) -> Path | None:
    """The file of weights to load: the one that the user names, or the first of _WEIGHTS that
    is in the folder. None if the folder has none.

    Args:
        folder: The folder of the model.
        chosen: The user's --weights; None if it is not given.

    Raises:
        UsageError: Where the user's file does not exist.
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
        # an adapter (LoRA) has only a few matrices, which change a model of another folder
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
        config_file: The path of config.json, for messages.
        name: The name of the class in the config.
        fields: The config after `_without_loading_keys`. It is changed:
            `attn_implementation` is taken out.
        weights_file: The name of the file of weights, for messages.
        tensors: The weights, by name.
        options: How the model is loaded: `partial`, and the `seed` of missing weights.

    Raises:
        LoadError: Where transformers is not installed, or has no such class of models for
            images; or where the config does not fit the class, or the weights the model.
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
        # with a bad config, constructors may raise anything
        except Exception as error:
            raise LoadError(
                f"{name} could not be built of {config_file} and {weights_file}:"
                f" {quoted(first_line(error))}",
                "is it the config of these weights? --partial loads what fits",
            ) from error
    _check_fit(name, weights_file, info, options.partial)
    return module  # type: ignore[no-any-return]


def _check_fit(name: str, file: str, info: dict[str, Any], partial: bool) -> None:
    """Check that a model got all its weights. Weights that the model does not use are only
    warned of.

    Args:
        name: The class of the model.
        file: The name of the file of weights.
        info: The report of `from_pretrained` on loading.
        partial: Whether missing weights are only warned of (--partial).

    Raises:
        LoadError: Where weights are missing or have another shape, and not `partial`.
    """
    # from_pretrained fills missing and misshapen weights with random numbers, and only warns
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
    """A copy of a config without the keys of _LEFT_OUT, at every depth.

    Args:
        value: The config, or a value in it.
        file: The path of config.json, for messages.
        architecture: The class that the config names, for messages.

    Raises:
        LoadError: Where the config asks to run code of the folder, or its weights are
            quantised.
    """
    if isinstance(value, list):
        return [_without_loading_keys(item, file, architecture) for item in value]
    if not isinstance(value, dict):
        return value
    # auto_map names Python files of the folder, which transformers would import
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
    """The class of transformers that a config names.

    Args:
        config_file: The path of config.json, for messages.
        name: The name of the class in the config.
        library: The imported package transformers.

    Raises:
        LoadError: Where transformers has no such class of models, the class only wraps a
            model of timm, or its models take no image.
    """
    model_class: Any = None
    try:
        model_class = getattr(library, name, None) if name.isidentifier() else None
    except Exception:  # the class needs a package that is not installed
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
        raise _no_image_error(name, first)
    return model_class


def _is_model_of(library: Any, value: Any) -> bool:
    """Whether a value is a class of models that transformers itself defines, and no wrapper of
    timm's models."""
    if not isinstance(value, type) or not issubclass(value, library.PreTrainedModel):
        return False
    module = value.__module__
    is_own = module.startswith("transformers.models.") and "timm" not in module
    return is_own and getattr(value, "config_class", None) is not None


def _no_image_error(name: str, first: str) -> LoadError:
    """The error for a model whose forward does not take an image first.

    Args:
        name: The class of the model.
        first: The name of the first argument of its forward.
    """
    return LoadError(
        f"{name} takes {first} first, and featviz gives it an image",
        f"a model whose forward begins with {_IMAGE}; or --arch file.py:factory"
        " that wraps it",
    )


def _check_parts(value: Any, file: str, config_class: type) -> None:
    """Raise a LoadError for a configuration that would fetch a backbone, open another folder,
    or pass arguments to timm. Configurations inside it are checked, too, at every depth.

    Args:
        value: A configuration, or a dict, list or tuple in it.
        file: The path of config.json, for messages.
        config_class: The base class of all configurations of transformers.
    """
    if isinstance(value, config_class):
        # timm fetches a name with `hf-hub:`, and opens another folder for `local-dir:`
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
    """A context in which transformers shows no progress bars or warnings, and does not use the
    network.

    Args:
        library: The imported package transformers.
    """
    messages = library.utils.logging
    hub: Any = import_module("huggingface_hub.constants")
    was_offline = hub.HF_HUB_OFFLINE
    # these are settings of the whole process, so they are restored at the end
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
