"""The errors that end a command with one clear line. This module imports no other module
of featviz."""

from __future__ import annotations

from typing import Any

NOTHING_DRAWN = (
    "take other --layers, or other --channels; `featviz layers MODEL` lists layers, with"
    " shapes and calls"
)
"""The hint for a run in which no layer gave a picture."""

OF_THE_START: dict[str, Any] = {"waits": True}
"""`extra` for a warning about all results, such as one of random weights. The command line
prints such a warning with the first result; if an error comes first, never."""

CHECK_FAILED = 4
"""The exit code if a check, such as a gate, did not pass. This is not an error: the
command did its work."""


class FeatvizError(Exception):
    """An error that the user can mend. Its message has the wrong value, its hint the
    remedy.

    `exit_code` is the exit code of the command line for this error. If a changed command
    would succeed, the command line shows it: with the arguments `add`; or with an argument
    replaced, by `replace`, a pair of the old and the new one. `instead` are arguments that
    would help as well as `add`: then the hint names both remedies, with `; ` between them.
    `options` are the names of options that the message writes as Python does (`size=big`);
    the command line writes them as users type them (`--size big`)."""

    exit_code = 1

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        *,
        add: tuple[str, ...] = (),
        instead: tuple[str, ...] = (),
        replace: tuple[str, str] | None = None,
        options: tuple[str, ...] = (),
    ) -> None:
        """Make an error, as the docstring of the class says. A traceback also shows the
        hint."""
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint is not None:
            self.add_note(f"hint: {hint}")
        self.add = add
        self.instead = instead
        self.replace = replace
        self.options = options


class UsageError(FeatvizError):
    """A bad option or argument: no such model, layer, file or value."""

    exit_code = 2


class FileError(FeatvizError):
    """A file cannot be read, or is not what it should be."""


class LoadError(FeatvizError):
    """No model could be made from a model file or a function of the user."""


class ImageError(FeatvizError):
    """An image cannot be read, or the model does not take it. The command goes on with the
    other images."""


class ForwardError(FeatvizError):
    """The model raised an exception for an image. The command goes on with the other
    images."""


class LayoutError(FeatvizError):
    """No layout can turn a tensor into maps. The tensor is skipped, with this reason."""


class StoreError(FeatvizError):
    """A run directory, or another result, cannot be read or written."""


class CompareError(FeatvizError):
    """Two runs cannot be compared, since they have different models or settings."""
