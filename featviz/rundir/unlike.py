"""What tells a run from another, in words."""

from __future__ import annotations

import json
from os.path import commonprefix
from typing import Any

from featviz.options import flag
from featviz.text import printable, quoted

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
