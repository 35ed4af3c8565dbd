"""Where `look` and `cam` write their pictures, and what must not be written over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from featviz.errors import UsageError
from featviz.images import find
from featviz.models.load import LoadedModel, ModelOptions
from featviz.records import Sample
from featviz.rundir import destination
from featviz.text import quoted


def software(command: str) -> str:
    """What a picture of a command says of who made it."""
    return f"featviz {command}"


def check_places(
    command: str,
    places: Iterable[Path],
    model: ModelOptions | LoadedModel,
    samples: Sequence[Sample],
    overwrite: bool,
) -> None:
    """Refuse bad places of pictures, before the model is loaded.

    Args:
        overwrite: whether a file that is no picture of the command may go.

    Raises:
        UsageError: a place is no PNG file, or holds an image or the model.
        StoreError: something else is there.
    """
    names = () if isinstance(model, LoadedModel) else (model.spec, model.arch, model.weights)
    inputs = [*find.files_of(samples), *destination.model_files(*names)]
    by = software(command)
    for path in places:
        check_png(command, path)
        destination.check_apart(path, "--out", inputs)
        destination.check_picture(path, by, f"picture of {by}", overwrite)


def check_png(command: str, out: Path) -> None:
    """Refuse a name of a file that ends otherwise.

    Raises:
        UsageError: names the one that would do.
    """
    if out.suffix.lower() != ".png":
        other = quoted(str(out.with_suffix(".png")))
        raise UsageError(f"--out {quoted(str(out))}: {command} writes PNG", f"--out {other}")
