"""Where `diff` keeps the runs of two models, whose maps it then compares.

--out OUT          OUT/base  OUT/new  OUT/diff-maps
--html PAGE.html   PAGE-runs/base  PAGE-runs/new, since the page shows their pictures
neither            a temporary folder
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from featviz.errors import StoreError
from featviz.options.commands import DiffFiles
from featviz.rundir.place import RUN, check_free

MAPS = "diff-maps"
"""The folder of the difference maps in --out, if --out also holds the runs."""


class ModelRuns(NamedTuple):
    """Where two models are run, and where their comparison is written."""

    base: Path
    """The run directory of BASE."""
    new: Path
    files: DiffFiles
    """With `out` as the folder of the difference maps."""


@contextmanager
def model_runs(files: DiffFiles) -> Iterator[ModelRuns]:
    """The folders into which two models are run. Temporary folders are removed at the end
    of the block.

    Args:
        files: the paths that the user gave.

    Raises:
        StoreError: a folder holds an earlier run, and `files.overwrite` is False; or it
            holds something that is no run.
    """
    root = files.out
    if root is not None:
        files = structs.replace(files, out=root / MAPS)
    elif files.html is not None:
        root = files.html.with_name(f"{files.html.stem}-runs")
    if root is None:
        with tempfile.TemporaryDirectory(prefix="featviz-") as temporary:
            yield ModelRuns(Path(temporary, "base"), Path(temporary, "new"), files)
        return
    runs = ModelRuns(root / "base", root / "new", files)
    for folder in (runs.base, runs.new):
        try:
            check_free(folder, RUN, files.overwrite)
        except StoreError as error:
            if not error.add:
                raise
            # the hint of a run names --resume, which two models do not have
            raise StoreError(
                f"{folder} holds the run of an earlier comparison",
                "--overwrite replaces it",
                add=("--overwrite",),
            ) from error
    yield runs
