"""`config.json` of a folder: which class of transformers it names, and what of it is believed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from featviz.errors import FileError, LoadError
from featviz.files import read_json
from featviz.models import outline
from featviz.text import quoted

FILE = "config.json"

_LARGEST = 2**20
"""The largest whole number in a config, and the largest sum of a list of them: transformers makes
lists of so many entries (one for each layer, say) before there is any tensor."""

_NAMED = re.compile(r"num_labels|\w*(layers|depths?|stages|blocks)")
_MOST_NAMED = 2**16
"""Keys of numbers with a lower limit: each class, layer and stage gets a name."""

_LEFT_OUT = re.compile(
    r"_?(attn|experts)_implementation\w*|(torch_)?dtype|fusion_config|kernel_config|use_kernels"
    r"|transformers_weights|distributed_config|use_pretrained_backbone|name_or_path|_name_or_path"
)
"""Keys that say how and from where to load, not what the model is."""

_ELSEWHERE = re.compile(r"(hf[-_]hub|local[-_]dir|https?):")
"""Begins the name of a backbone that timm would fetch, or read from another folder."""


@dataclass(frozen=True)
class Config:
    """What a `config.json` says, without what decides how it is loaded."""

    folder: Path
    architecture: str
    """The class: `ViTForImageClassification`."""
    fields: Mapping[str, Any]

    @property
    def words(self) -> str:
        """The file, for messages."""
        return str(self.folder / FILE)


def architecture_beside(path: Path) -> str | None:
    """The class of transformers that a `config.json` beside a file names; None without one."""
    try:
        fields = read_json(path.with_name(FILE))
    except (FileNotFoundError, FileError):
        return None
    return _architecture(fields) if isinstance(fields, dict) else None


def read(folder: Path) -> Config:
    """Read a folder's config.

    Raises:
        LoadError: there is none, it names no class of transformers, wants code of its own to run,
            or holds a number that no model has.
    """
    where = quoted(str(folder / FILE))
    try:
        fields = read_json(folder / FILE)
    except FileNotFoundError as error:
        raise _no_config(folder) from error
    except FileError as error:
        raise LoadError(f"{error}", "fetch the file again") from error
    architecture = _architecture(fields) if isinstance(fields, dict) else None
    if architecture is None and isinstance(fields, dict) and "architecture" in fields:
        raise LoadError(f"{where} is one of timm's, or of none", "pip install 'featviz[timm]'")
    if architecture is None:
        raise LoadError(
            f"{where} names no architecture of transformers",
            '"architectures": ["ViTModel"] in it would; of another library, give the file of '
            f"weights and what builds the model: {_weights_in(folder) or 'FILE'} "
            "--arch file.py:factory",
        )
    _check(fields, where, architecture)
    return Config(folder, architecture, _without(fields))


def model_class(config: Config) -> Any:
    """The class that a config names, a subclass of PreTrainedModel that transformers defines.

    Raises:
        LoadError: transformers is not installed, or has no such model.
    """
    return _defined(library(config), config)


def library(config: Config) -> ModuleType:
    """The package transformers.

    Raises:
        LoadError: it is not installed.
    """
    try:
        return import_module("transformers")
    except ImportError as error:
        raise LoadError(
            f"{quoted(config.architecture)} is a model of the package transformers: {error}",
            "pip install 'featviz[hf]'",
        ) from error


def named(package: ModuleType, name: str, base: str) -> Any:
    """A class of transformers by name, if it is defined in `transformers.models` and is a subclass
    of `base`; else None."""
    if not name.isidentifier():
        return None
    try:
        kind = getattr(package, name, None)
    except Exception:  # a model whose own requirements are not installed
        return None
    if not isinstance(kind, type) or not issubclass(kind, getattr(package, base)):
        return None
    return kind if kind.__module__.startswith("transformers.models.") else None


def _defined(package: ModuleType, config: Config) -> Any:
    kind = named(package, config.architecture, "PreTrainedModel")
    if kind is None or getattr(kind, "config_class", None) is None:
        raise LoadError(
            f"{quoted(config.words)} names {quoted(config.architecture)}, which is no model of "
            f"transformers {package.__version__}",
            "pip install --upgrade transformers",
        )
    return kind


def _architecture(fields: Mapping[str, Any]) -> str | None:
    """The first of the architectures."""
    names = fields.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _no_config(folder: Path) -> LoadError:
    where = quoted(str(folder))
    if (folder / "adapter_config.json").is_file():
        return LoadError(
            f"{where} holds an adapter without the model that it adapts",
            "merge it first: peft's model.merge_and_unload().save_pretrained(DIR)",
        )
    names = sorted(path.name for path in folder.iterdir())[:4]
    there = ", ".join(map(quoted, names)) or "nothing"
    return LoadError(
        f"{where} is no folder of a Hugging Face model: it lacks {FILE} (it holds {there})",
        _instead_of(folder),
    )


def _instead_of(folder: Path) -> str:
    """What to write for a folder: a file of weights in it, or a class of its code."""
    weights = _weights_in(folder)
    if weights is None and (made := outline.models_in([folder])):
        file, maker = made[0]
        return f"name a class of the code in it: {maker.words(quoted(str(file)))}"
    file = folder / "FILE"
    return (
        f"give a file of weights and its architecture: {weights or quoted(str(file))} --arch MODEL"
    )


def _weights_in(folder: Path) -> str | None:
    suffixes = (".safetensors", ".bin", ".pth", ".pt", ".ckpt")
    names = sorted(path.name for path in folder.iterdir() if path.suffix in suffixes)
    return quoted(str(folder / names[0])) if names else None


def _check(value: Any, where: str, architecture: str, key: str = "") -> None:
    """Refuse, at every depth, what would run code, fetch something or make lists without end.

    Raises:
        LoadError: names the key.
    """
    if key in ("auto_map", "custom_pipelines") and value:
        raise LoadError(
            f"{where} wants code of its own to run (auto_map), which featviz does not do",
            "if you trust it: --arch file.py:factory with a function of your own that loads it",
        )
    if key == "quantization_config" and value:
        raise LoadError(
            f"{where} says that the weights of {quoted(architecture)} are quantised",
            "save the model that they were made from, in float",
        )
    if key == "backbone" and isinstance(value, str) and _ELSEWHERE.match(value):
        raise LoadError(f"{where} names a backbone elsewhere: {quoted(value)}", None)
    if isinstance(value, dict):
        for name, item in value.items():
            _check(item, where, architecture, name)
    elif isinstance(value, list):
        for item in value:
            _check(item, where, architecture)
    size = sum(map(_size, value)) if isinstance(value, list) else _size(value)
    most = _MOST_NAMED if _NAMED.fullmatch(key) else _LARGEST
    if size > most:
        what = quoted(key) or "a number"
        raise LoadError(f"{where} has {what} of {size:,}; {most:,} is the most")


def _size(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def _without(value: Any) -> Any:
    """The same values without the keys that say how to load, at every depth."""
    if isinstance(value, dict):
        return {k: _without(item) for k, item in value.items() if not _LEFT_OUT.fullmatch(k)}
    return [_without(item) for item in value] if isinstance(value, list) else value
