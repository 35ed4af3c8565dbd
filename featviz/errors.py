"""The errors that end a command with one clear line; this module knows nothing of the
rest."""

from __future__ import annotations

from typing import Any

NOTHING_DRAWN = (
    "take other --layers, or other --channels; `featviz layers MODEL` lists layers, with"
    " shapes and calls"
)
"""The hint where no layer gave a picture."""

OF_THE_START: dict[str, Any] = {"waits": True}
"""`extra` of a warning of what all results rest on, such as random weights. The command
line prints it with the first result: an error that comes before needs no warning."""

CHECK_FAILED = 4
"""Exit code where a check that was asked for did not hold: no error, the command did
its work."""


class FeatvizError(Exception):
    """Something the user can mend: a message with the value, and a hint with the
    remedy.

    `exit_code` is what the command line ends with when the error reaches it. Where a
    change of the command would go on, `add` are the arguments that it lacks and
    `replace` is one that it has, with what should stand there; the command line shows
    the whole command. `instead` are arguments that would help in place of `add`: then
    the hint names both remedies, with `; ` between them. `options` are those that the
    message names as Python does (`size=big`); the command line names them as they are
    typed (`--size big`)."""

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
        """Keep what the class says; a traceback shows the hint as well."""
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
    """A file that somebody else wrote and that cannot be used: names it and says why."""


class LoadError(FeatvizError):
    """A model file or factory from which no model could be made."""


class ImageError(FeatvizError):
    """An image that could not be read; the other images go on."""


class ForwardError(FeatvizError):
    """The model raised while an image went through it; the other images go on."""


class LayoutError(FeatvizError):
    """A tensor that no layout can turn into maps; it is skipped with this reason."""


class StoreError(FeatvizError):
    """The run directory cannot be written or read."""


class CompareError(FeatvizError):
    """Runs that cannot be set side by side, since they did not do the same."""
