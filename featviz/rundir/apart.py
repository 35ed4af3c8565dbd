"""Whether what is written stays apart from what is read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from featviz.errors import UsageError
from featviz.text import quoted


def check_apart(out: Path, option: str, inputs: Iterable[Path]) -> None:
    """Refuse to write where an input is: over it, or into a folder that holds it.

    A folder below that of the images is fine: it was none of them when the command began.

    Args:
        out: the file or folder that will be written.
        option: by which it was named.
        inputs: files and folders that the command reads.

    Raises:
        UsageError: names the first input that is in the way.
    """
    place = os.path.realpath(out)
    within = place.rstrip(os.sep) + os.sep
    for path in inputs:
        for form in _forms(path):
            if form == place or form.startswith(within):
                what = "is" if form == place else "holds"
                raise UsageError(
                    f"{option} {quoted(str(out))} {what} the input {quoted(str(path))}",
                    f"name another place with {option}",
                )


def model_files(*told: str | None) -> list[Path]:
    """The files and folders that MODEL strings lead to: `net.pth`, `net.py:make`, `hf:DIR`."""
    found = []
    for text in filter(None, told):
        forms = (text, text.partition(":")[2], text.rpartition(":")[0])
        paths = [Path(form) for form in forms if form]
        found += [path for path in paths if path.is_file() or (path / "config.json").is_file()]
    return found


def _forms(path: Path) -> set[str]:
    """Where a path leads, and where it stands, if it is a link itself."""
    above = os.path.realpath(path.absolute().parent)
    return {os.path.realpath(path), str(Path(above, path.name))}
