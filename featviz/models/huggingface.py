"""Folders of models of transformers (extra `featviz[hf]`), which itself reads no file of theirs."""

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
    """The part of a dual encoder that sees images; its modules keep the names they have there."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.config, self.training = whole.config, whole.training
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
        hint = "merge it with its model by peft: model.merge_and_unload().save_pretrained('DIR')"
        raise LoadError(message, f"{hint}; MODEL is DIR")
    path = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if options.weights is not None:
        path = Path(options.weights)
        if not path.is_file():
            raise UsageError(f"--weights {options.weights!r} is no file", "give a file")
    beside = architecture_beside(folder / _FILE)
    if path is not None and beside and beside.startswith("timm:"):
        found = structs.replace(options, spec=str(path), weights=None, arch=beside)
        loaded = load_source(found)
        return loaded._replace(record={**loaded.record, "kind": "huggingface"})
    where = quoted(str(folder / _FILE))
    try:
        fields = read_json(folder / _FILE)
    except FileNotFoundError as error:
        words = f"{quoted(str(folder))} is no folder of a Hugging Face model: it lacks {_FILE}"
        hint = "give a file of weights and its architecture: FILE --arch MODEL"
        raise LoadError(words, hint) from error
    except FileError as error:
        raise LoadError(f"{error}", "fetch the file again") from error
    if beside is None or beside.startswith("timm:"):
        words = f"{where} names no architecture of transformers"
        hint = "give the file of weights, and --arch file.py:factory or timm:NAME"
        raise LoadError(words, hint)
    architecture, fields = beside, _checked(fields, where, beside)
    if path is None:
        words = f"{folder} has no weights: none of {', '.join(_WEIGHTS)}"
        raise LoadError(words, "--weights FILE names them")
    tensors, steps = weights.read_weights(path, options)
    fields = {**fields, **options.model_args}
    module = _built(where, architecture, fields, path.name, tensors, options)
    if (first := next(iter(inspect.signature(module.forward).parameters))) != _IMAGE:
        if not hasattr(module, "vision_model"):
            raise _no_image(architecture, first)
        log.info("%s is run by its vision tower (get_image_features)", architecture)
        module = ImageTower(module)
    log.info("%s: %s", folder.name, architecture)
    record = {"name": folder.resolve().name, "arch": architecture, **weights.record(path)}
    source = {"kind": "huggingface", **record, **({"taken": list(steps)} if steps else {})}
    return Loaded(module, source, from_transformers(folder, fields), (None, image_size(fields)))


def _built(
    where: str, name: str, fields: dict[str, Any], file: str, tensors: Any, options: ModelOptions
) -> nn.Module:
    """The module of a checked config, with the tensors of a file."""
    attention = str(fields.pop("attn_implementation", "eager"))  # so that its weights can be seen
    try:
        library: Any = import_module("transformers")
    except ImportError as error:
        words = f"{quoted(name)} is a model of the package transformers: {error}"
        raise LoadError(words, "pip install 'featviz[hf]'") from error
    kind = _model_class(where, name, library)
    with _quiet(library), torch.random.fork_rng(devices=()):
        torch.manual_seed(options.seed)
        try:
            config = kind.config_class.from_dict(dict(fields))
            _check_parts(config, where, library.PreTrainedConfig)
            module, info = kind.from_pretrained(
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
        except Exception as error:  # whatever the constructors of a class make of a bad config
            words = f"{name} could not be built of {where} and {file}"
            message = f"{words}: {quoted(first_line(error))}"
            hint = "is it the config of these weights? --partial loads what fits"
            raise LoadError(message, hint) from error
    odd = [*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])]
    words = f"{file} does not fit {name}: missing or of another shape: {_some(odd)}"
    if odd and not options.partial:
        raise LoadError(words, "the config of these weights, or --partial for what fits")
    if odd:
        log.warning("%s (--partial: these are random)", words)
    if unused := info["unexpected_keys"]:
        log.warning("%s has no use for %s", name, _some(unused))
    return module  # type: ignore[no-any-return]


def _checked(value: Any, where: str, architecture: str) -> Any:
    """The same values without the keys that say how to load, at every depth."""
    if isinstance(value, list):
        return [_checked(item, where, architecture) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("auto_map"):
        words = f"{where} wants code of its own to run (auto_map)"
        raise LoadError(words, "if you trust it: --arch file.py:factory, which loads it")
    if value.get("quantization_config"):
        words = f"{where} says that the weights of {quoted(architecture)} are quantised"
        raise LoadError(words, "save the model that they were made from, in float")
    kept = {key: item for key, item in value.items() if not _LEFT_OUT.fullmatch(key)}
    return {key: _checked(item, where, architecture) for key, item in kept.items()}


def _model_class(where: str, name: str, library: Any) -> Any:
    """The class that a config names: transformers' own, which takes an image, and none of
    timm's."""
    kind: Any = None
    try:
        kind = getattr(library, name, None) if name.isidentifier() else None
    except Exception:  # a model whose own requirements are not installed
        log.debug("%s cannot be imported", name, exc_info=True)
    own = isinstance(kind, type) and kind.__module__.startswith("transformers.models.")
    model = own and issubclass(kind, library.PreTrainedModel) and "timm" not in kind.__module__
    if not model or getattr(kind, "config_class", None) is None:
        words = f"{where} names {quoted(name)}, which is no model of transformers "
        hint = "pip install --upgrade transformers; a model of timm's is --arch timm:NAME"
        raise LoadError(words + library.__version__, hint)
    first = list(inspect.signature(kind.forward).parameters)[1]
    if first != _IMAGE and not hasattr(kind, "get_image_features"):
        raise _no_image(name, first)
    return kind


def _no_image(name: str, first: str) -> LoadError:
    return LoadError(
        f"{name} takes {first} first, and featviz gives it an image",
        f"a model whose forward begins with {_IMAGE}; or --arch file.py:factory that wraps it",
    )


def _check_parts(value: Any, where: str, kind: type) -> None:
    """Refuse what a configuration, or one in it at any depth, would fetch or build elsewhere."""
    if isinstance(value, kind):
        for key in ("architecture", "backbone"):
            if ":" in (name := str(getattr(value, key, ""))):
                words = f"{where} names a backbone elsewhere: {quoted(name)}"
                hint = "a folder that names one of transformers, or a plain one of timm"
                raise LoadError(words, hint)
        if getattr(value, "model_args", None):
            raise LoadError(f"{where} gives timm arguments of its own (model_args)")
        value = vars(value)
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (kind, dict, list, tuple)):
            _check_parts(item, where, kind)


def _some(keys: Iterable[str]) -> str:
    return listed([quoted(str(key)) for key in sorted(keys)], 4)


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """transformers without progress bars, warnings and connections."""
    words = library.utils.logging
    hub: Any = import_module("huggingface_hub.constants")
    offline, hub.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE, True
    level, bars = words.get_verbosity(), words.is_progress_bar_enabled()
    words.set_verbosity_error()
    words.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hub.HF_HUB_OFFLINE = offline
        words.set_verbosity(level)
        if bars:
            words.enable_progress_bar()
