"""Where a run is written: a place that no other run is written into, and that is hidden until the
run is whole where it replaces another run."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from msgspec.structs import replace

from featviz.errors import FeatvizError, StoreError
from featviz.options import RunOptions
from featviz.pipeline.options import check_options
from featviz.rundir import lock, store
from featviz.rundir.atomic import reported
from featviz.rundir.place import (
    RUN,
    can_be_replaced,
    check_free,
    clear_beside,
    hidden_beside,
    put_in_place,
)
from featviz.rundir.read import read_record
from featviz.text import quoted

log = logging.getLogger(__name__)


@contextmanager
def held(options: RunOptions) -> Iterator[None]:
    """No other process writes into the place of the run, but other shards of it.

    Raises:
        UsageError: a bad option.
        StoreError: another process writes into it.
    """
    check_options(options)
    url, shard = options.url, options.shard
    with lock.held(options.out, shard) if url is None else store.held(url, shard):
        yield


def together(options: RunOptions) -> AbstractContextManager[None]:
    """Be the only one of several shards that opens the place, or writes run.json."""
    if options.shard is None:
        return nullcontext()
    return store.among_shards(options.url) if options.url else lock.among_shards(options.out)


@contextmanager
def place(options: RunOptions) -> Iterator[RunOptions]:
    """The options with the folder to write into: a hidden one where the run takes the place of
    another run when it is whole; one for files on their way to a store."""
    if options.url is not None:
        with store.temporary(options.url.name) as folder:
            yield replace(options, out=folder)
        return
    earlier = None
    if options.overwrite:
        clear_beside(options.out)
        earlier = check_free(options.out, RUN, True)
    if earlier is None or not earlier.complete or not can_be_replaced(options.out):
        yield options
        return
    fresh = hidden_beside(options.out)
    try:
        yield replace(options, out=fresh, resume=False, overwrite=False)
    except BaseException:
        with suppress(FeatvizError, BrokenPipeError):
            _replace_run(options.out, fresh)
        raise
    _replace_run(options.out, fresh)


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
