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
"""Where the YAML of Ultralytics' data sets and the config.json of transformers keep
names."""

_CHECKPOINT_KEYS = ("names", "classes", "class_names", "idx_to_class", "class_to_idx")
"""Where trainings keep names in a checkpoint; the last has the numbers by the names, as
torchvision's ImageFolder does."""


def read_classes(path: str | Path | Sequence[str]) -> tuple[str, ...]:
    """The names of a model's classes, by their numbers from 0 on.

    Args:
        path: a text with a name on each line; or a `.json`, `.yaml` or `.yml` that
            holds a list, or a mapping from numbers to names, itself or under `names` or
            `id2label`. Or the names themselves, in a list.

    Raises:
        UsageError: there is no such file, or it holds no names.
    """
    title = f"--classes {quoted(path)}"
    try:
        content = _content(Path(path)) if isinstance(path, (str, Path)) else path
        names = _listed(content)
    except FileNotFoundError:
        raise UsageError(f"{title}: there is no such file", _HINT) from None
    except (FileError, ValueError, TypeError) as error:
        raise UsageError(f"{title} cannot be read: {quoted(error)}", _HINT) from None
    if not names:
        raise UsageError(f"{title} holds no names", _HINT)
    return tuple(printable(name) for name in names)


def _content(path: Path) -> Any:
    """What a file of names holds: the value of JSON or YAML, else its lines.

    Raises:
        FileNotFoundError, FileError: Where it cannot be read.
        UsageError: Where YAML is not installed.
        ValueError: Where it is not JSON, or not YAML.
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


def _listed(content: Any) -> list[str]:
    """The names in the order of their numbers; ValueError where a number is left out."""
    if isinstance(content, Mapping):
        for key in _KEYS:
            if key in content:
                return _listed(content[key])
        by_number = {int(number): name for number, name in content.items()}
        if set(by_number) != set(range(len(by_number))):
            raise ValueError(f"the numbers are not 0 to {len(by_number) - 1}")
        content = [by_number[number] for number in range(len(by_number))]
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"it holds {type(content).__name__}, not a list of names")
    return [str(name) for name in content]


def classes_of(checkpoint: Any) -> tuple[str, ...]:
    """The names of classes that a checkpoint has under a usual key; none where it has
    none, or something else stands there, such as the number of classes."""
    if not isinstance(checkpoint, Mapping):
        return ()
    for key in _CHECKPOINT_KEYS:
        content = checkpoint.get(key)
        with suppress(ValueError, TypeError):
            if key == "class_to_idx" and isinstance(content, Mapping):
                content = {number: name for name, number in content.items()}
            names = _listed(content)
            # mere numbers, as of a data set whose classes have no names, name nothing
            if not all(name.isdecimal() for name in names):
                return tuple(printable(name) for name in names)
    return ()
