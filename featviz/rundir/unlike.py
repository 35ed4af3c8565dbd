"""What tells a run from another, in words: where a place is taken, or a run is to go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os.path import commonprefix
from typing import Any

from featviz.errors import StoreError
from featviz.options import flag
from featviz.text import counted, printable, quoted

_USUALLY_ON = ("marks",)
"""Options that are given as `--no-NAME`."""
_SHOWN = 60
"""Characters of a value that a refusal shows."""
_BEFORE = 20
"""Those of them that stand before the first that differs, where it is far behind."""


def differences(old: Any, new: Any) -> list[str]:
    """In words, what of two records is not the same; options come first."""
    found: list[str] = []

    def compare(old: Any, new: Any, where: str) -> None:
        if isinstance(old, dict) and isinstance(new, dict):
            for key in dict.fromkeys((*old, *new)):
                compare(old.get(key), new.get(key), f"{where}.{key}".lstrip("."))
        elif old != new and where.startswith("options."):
            there, here = (_as_typed(where.removeprefix("options."), value) for value in (old, new))
            found.append(f"there {there}, here {here}")
        elif old != new:
            there, here = _short(old, new)
            found.append(f"its {printable(where)} is {there}, this one's {here}")

    compare(old, new, "")
    return sorted(found, key=lambda words: not words.startswith("there "))


def _as_typed(name: str, value: Any) -> str:
    """An option as one types it: `--layers ReLU`; `none` where one types nothing."""
    if value is None or value == [] or value is (name in _USUALLY_ON):
        return "none"
    if isinstance(value, bool):
        return quoted(flag(name) if value else f"--no-{name}")
    parts = value if isinstance(value, list) else [value]
    if name in ("ablate", "edit", "tensor_layout"):
        return quoted(" ".join(f"{flag(name)} {part}" for part in parts))
    separator = "x" if name in ("size", "crop") else ","
    return quoted(f"{flag(name)} {separator.join(map(str, parts))}")


def _short(*values: Any) -> list[str]:
    """Values in words; long ones from shortly before what differs."""
    texts = [json.dumps(value, ensure_ascii=False) for value in values]
    alike = len(commonprefix(texts))  # noqa: RUF071 - characters are meant
    begin = alike - _BEFORE if alike > _SHOWN - _BEFORE else 0
    shown = []
    for text in texts:
        if len(text) > _SHOWN:
            part = text[begin : begin + _SHOWN - 3]
            text = f"{'...' * bool(begin)}{part}{'...' * (text[begin:] != part)}"
        shown.append(quoted(text))
    return shown


def taken(
    where: str,
    noun: str,
    earlier: Mapping[str, Any],
    complete: int,
    record: Mapping[str, Any] | None,
    certain: bool,
    hint: str,
) -> StoreError:
    """The refusal of a place that holds a result with complete images.

    Args:
        earlier: the content of its run.json.
        record, certain: as for `check_free`.
    """
    if record is None or "kind" in record or "kind" in earlier:
        return StoreError(f"--out {where} holds another {noun}", hint)
    plain = json.loads(json.dumps(record, default=str))
    if unlike := differences(_common(earlier, plain), plain):
        return StoreError(
            f"--out {where} holds another run; {unlike[0]}", f"{hint}; --resume takes the same run"
        )
    name = "the same run" if certain else "a run with the same options"
    count = f"{counted(complete, 'image')} complete"
    return StoreError(f"--out {where} holds {name}, {count}", f"--resume goes on with it, {hint}")


def _common(old: Any, new: Any) -> Any:
    """The entries of a record that the other one has, too."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return old
    return {key: _common(old[key], new[key]) for key in old if key in new}
