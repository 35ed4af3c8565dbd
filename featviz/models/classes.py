"""Names of classes from a file (lines of text, JSON, or YAML as Ultralytics writes it),
or from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from featviz.errors import FileError, UsageError
from featviz.files import parse_json, read_text
from featviz.text import printable, quoted

_HINT = "a name on each line; or JSON or YAML with a list, or with numbers and names"
_KEYS = ("names", "id2label")
"""Keys of names in the YAML of Ultralytics' data sets, and in the config.json of
transformers."""

_CHECKPOINT_KEYS = ("names", "classes", "class_names", "idx_to_class", "class_to_idx")
"""Keys under which training scripts keep names in a checkpoint. The value of the last is a
dict from names to numbers, as torchvision's ImageFolder writes it."""


def read_classes(classes: str | Path | Sequence[str]) -> tuple[str, ...]:
    """The names of a model's classes, in the order of their numbers, from 0 on.

    Args:
        classes: The path of a text with a name on each line; or of a `.json`, `.yaml` or
            `.yml` with a list, or with a mapping from numbers to names, which may lie
            under `names` or `id2label`. Or the names themselves, in a list.

    Raises:
        UsageError: Where there is no such file, it cannot be read, or it holds no names.
    """
    title = f"--classes {quoted(classes)}"
    try:
        names = _names_in(
            _content(Path(classes)) if isinstance(classes, (str, Path)) else classes
        )
    except FileNotFoundError:
        raise UsageError(f"{title}: there is no such file", _HINT) from None
    except (FileError, ValueError, TypeError) as error:
        raise UsageError(f"{title} cannot be read: {quoted(error)}", _HINT) from None
    if not names:
        raise UsageError(f"{title} holds no names", _HINT)
    return tuple(printable(name) for name in names)


def _content(path: Path) -> Any:
    """The content of a file of names: of a .json, .yaml or .yml file the value in it, of
    any other file its lines that are not empty.

    Raises:
        FileNotFoundError, FileError: Where the file cannot be read.
        UsageError: Where the package for YAML is not installed.
        ValueError: Where a .json file is not JSON, or a .yaml or .yml file not YAML.
    """
    text = read_text(path)
    suffix = path.suffix.lower()
    if suffix == ".json":
        return parse_json(text)
    if suffix not in (".yaml", ".yml"):
        return [line.strip() for line in text.splitlines() if line.strip()]
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError(
            f"{path.name} is YAML: {error}", "pip install pyyaml"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _names_in(content: Any) -> list[str]:
    """The names that a value holds, in the order of their numbers.

    Args:
        content: A list of names; a mapping from numbers to names; or a mapping that has
            one of these under one of _KEYS.

    Raises:
        ValueError, TypeError: Where `content` is none of these, or the numbers in it are
            not 0 to N - 1.
    """
    if isinstance(content, Mapping):
        for key in _KEYS:
            if key in content:
                return _names_in(content[key])
        by_number = {int(number): name for number, name in content.items()}
        if set(by_number) != set(range(len(by_number))):
            raise ValueError(f"the numbers are not 0 to {len(by_number) - 1}")
        content = [by_number[number] for number in range(len(by_number))]
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"it holds {type(content).__name__}, not a list of names")
    return [str(name) for name in content]


def classes_of(checkpoint: Any) -> tuple[str, ...]:
    """The names of classes that a checkpoint has under one of _CHECKPOINT_KEYS; empty if it
    has no such key, or no names there (such as the number of classes)."""
    if not isinstance(checkpoint, Mapping):
        return ()
    for key in _CHECKPOINT_KEYS:
        content = checkpoint.get(key)
        with suppress(ValueError, TypeError):
            if key == "class_to_idx" and isinstance(content, Mapping):
                content = {number: name for name, number in content.items()}
            names = _names_in(content)
            # a data set whose classes have no names has numbers in their place
            if not all(name.isdecimal() for name in names):
                return tuple(printable(name) for name in names)
    return ()
