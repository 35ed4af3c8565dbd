"""A series of runs of one model as it is trained: a run directory for each step, in one folder.

    OUT/step-000000/  OUT/step-000100/  ...

A step's folder is moved to its name when all of it is written: what has such a name and a run.json
is whole. Nothing here needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from featviz.errors import StoreError
from featviz.rundir import LOCK_FILE, REPORT, REPORT_FILE, REPORT_ZIP, RUN_FILE
from featviz.rundir.atomic import part_of, remove, reported
from featviz.rundir.place import RUN, Earlier, check_free
from featviz.text import quoted

_STEP = re.compile(r"step-(\d{6,15})")
_BESIDE = {LOCK_FILE, REPORT, REPORT_FILE, REPORT_ZIP}
"""What may stand beside the steps."""


def step_folder(root: Path, step: int) -> Path:
    """`OUT/step-000100`."""
    return root / f"step-{step:06d}"


def read_steps(root: Path) -> dict[int, Path]:
    """The training steps of a series and their run directories, in order; none where the folder is
    no series. Links are no steps."""
    named = step_folders(root)
    return {step: path for step, path in named.items() if (path / RUN_FILE).is_file()}


def step_folders(root: Path) -> dict[int, Path]:
    """What has the name of a step in a folder, in order, whole or not. Links are no steps."""
    if not root.is_dir():
        return {}
    with reported(root):
        named = [(_STEP.fullmatch(path.name), path) for path in root.iterdir()]
    found = {int(match[1]): path for match, path in named if match and not path.is_symlink()}
    return dict(sorted(found.items()))


def removable(root: Path, steps: Iterable[int]) -> dict[Path, Earlier]:
    """The run directories of steps, all of which may go."""
    found = {path: check_free(path, RUN, True) for path in (step_folder(root, n) for n in steps)}
    return {path: earlier for path, earlier in found.items() if earlier is not None}


def remove_steps(steps: Mapping[Path, Earlier]) -> None:
    """Remove run directories: what their records list."""
    for path, earlier in steps.items():
        remove(path, earlier.ours)


def check_series(root: Path, overwrite: bool, resume: bool, board: Path | None) -> list[int]:
    """Say before the training that a folder cannot become the series'.

    Args:
        board: the folder of TensorBoard's events, which may lie in it.

    Returns:
        The steps that it holds.
    """
    if root.exists() and not root.is_dir():
        raise StoreError(f"--out {root} is a file, not a folder", "name another with --out")
    steps = list(read_steps(root))
    if steps and not (overwrite or resume):
        raise StoreError(
            f"--out {quoted(str(root))} holds a series up to step {steps[-1]}",
            "overwrite=True replaces it, resume=True goes on with it, or name another --out",
        )
    if steps or not root.is_dir():
        return steps
    apart = [] if board is None else [board.resolve(), *board.resolve().parents]
    for path in sorted(root.iterdir()) if root.resolve() not in apart[:1] else ():
        if path.name not in _BESIDE and not part_of(path.name) and path.resolve() not in apart:
            raise StoreError(
                f"--out {quoted(str(root))} is not empty and holds no series: {quoted(path.name)}",
                "name another folder with --out",
            )
    return steps
