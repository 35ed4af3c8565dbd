"""Where a run is written: a place that no other run is written into, and that is hidden until the
run is whole where it replaces another run."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from featviz.errors import FeatvizError, StoreError
from featviz.files import real
from featviz.files.urls import Url
from featviz.options import RunOptions
from featviz.run.prepare import check_options
from featviz.rundir import lock, store
from featviz.rundir.atomic import remove, remove_empty, reported
from featviz.rundir.place import (
    RUN,
    Earlier,
    clear_beside,
    hidden_beside,
    put_in_place,
)
from featviz.rundir.read import read_record
from featviz.text import quoted

log = logging.getLogger(__name__)


@contextmanager
def held(options: RunOptions) -> Iterator[None]:
    """No other process writes into the place of the run, but other shards of it."""
    check_options(options)
    out, shard = options.out, options.shard
    with store.held(out, shard) if isinstance(out, Url) else lock.held(out, shard):
        yield


def together(options: RunOptions) -> AbstractContextManager[None]:
    """Be the only one of several shards that opens the place, or writes run.json."""
    if options.shard is None:
        return nullcontext()
    out = options.out
    return store.among_shards(out) if isinstance(out, Url) else lock.among_shards(out)


@contextmanager
def place(options: RunOptions, earlier: Earlier | None) -> Iterator[tuple[Path, RunOptions]]:
    """The folder to write into, and how: a hidden one where the run takes the place of an earlier
    one when it is whole; one for files on their way to a store."""
    if isinstance(options.out, Url):
        with store.temporary(options.out.name) as folder:
            yield folder, options
        return
    out = options.out
    if options.overwrite:
        clear_beside(out)
    fixed = real(out).is_mount() or not os.access(real(out).parent, os.W_OK)
    if earlier is None or not earlier.complete or fixed:
        if earlier is not None:
            remove(out, earlier.ours)
            remove_empty(out)
        yield out, options
        return
    fresh = hidden_beside(out)
    with in_any_case(partial(_replace_run, out, fresh)):
        yield fresh, replace(options, resume=False, overwrite=False)


def _replace_run(out: Path, fresh: Path) -> None:
    """Put a run in the place of the earlier one if all of its images are finished."""
    try:
        images = read_record(fresh)[1].images
    except StoreError:  # it had not begun
        shutil.rmtree(fresh, ignore_errors=True)
        return
    if not images.missing:
        with reported(out, f"the new run stays in {fresh}"):
            put_in_place(fresh, out, RUN)
    elif images.complete:
        log.warning(
            "%s stays as it was; what is done of the new run is in %s, where --resume goes on",
            quoted(str(out)),
            quoted(str(fresh)),
        )
    else:
        shutil.rmtree(fresh, ignore_errors=True)


@contextmanager
def in_any_case(task: Callable[[], object]) -> Iterator[None]:
    """Do something at the end of a block; if the block has failed, errors of the task are left
    out."""
    try:
        yield
    except BaseException:
        with suppress(FeatvizError, BrokenPipeError):
            task()
        raise
    task()
