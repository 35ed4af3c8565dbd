"""Where a run is written: a place that is this team's alone, and that is hidden until the run is
whole where it becomes an archive or replaces another run."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from featviz.errors import FeatvizError, StoreError
from featviz.files import real
from featviz.pipeline.options import RunOptions, check_options
from featviz.pipeline.processes import World
from featviz.pipeline.resume import besides
from featviz.rundir import RUN_FILE, archive, destination, lock
from featviz.rundir.atomic import reported
from featviz.rundir.read import read_record
from featviz.rundir.store import lock as store_lock
from featviz.rundir.store.fetch import temporary
from featviz.rundir.store.objects import ObjectStore
from featviz.rundir.write import check_free
from featviz.text import quoted

log = logging.getLogger(__name__)


@contextmanager
def held(options: RunOptions, team: World) -> Iterator[None]:
    """The place that the run is written into is this team's alone, by a lock of its first process.

    Raises:
        StoreError: another process writes into it.
    """

    def take() -> None:
        check_options(options)
        if options.url is not None:
            stack.enter_context(store_lock.held(ObjectStore(options.url), options.wait))
        elif options.archive is None:
            stack.enter_context(lock.held(options.out, options.wait))
        else:
            stack.enter_context(lock.held_file(options.archive, options.wait, "--archive"))

    with ExitStack() as stack:
        team.at_first(take)
        yield


@contextmanager
def place(options: RunOptions, team: World) -> Iterator[RunOptions]:
    """The options with the folder to write into: a hidden one where the run becomes an archive, or
    takes the place of another run when it is whole; one for files on their way to a store."""
    if options.url is not None:
        with temporary(options.url.name) as fresh:
            yield replace(options, out=fresh)
        return
    if options.archive is not None:
        with _packed(options, options.archive, team) as inside:
            yield inside
        return
    beside = team.at_first(partial(_beside, options))
    if beside is None:
        yield options
        return
    inside = replace(options, out=beside, overwrite=False)
    with in_any_case(partial(_replace_run, options, beside) if team.first else lambda: None):
        yield inside


@contextmanager
def _packed(options: RunOptions, target: Path, team: World) -> Iterator[RunOptions]:
    """A hidden folder, which is packed at the end, whatever it holds by then."""
    room = partial(archive.room_for_archive, target, options.overwrite, options.resume)
    inside = replace(options, out=team.at_first(room) / archive.ROOM, overwrite=False)
    with in_any_case(partial(_pack, inside.out, target) if team.first else lambda: None):
        yield inside


def _pack(root: Path, target: Path) -> None:
    if (root / RUN_FILE).is_file():
        try:
            archive.pack(root, target)
        except FeatvizError:
            words = "the run stays in %s; --resume with the same --archive goes on and packs it"
            log.warning(words, quoted(str(root)))
            raise
    shutil.rmtree(root.parent, ignore_errors=True)


def _beside(options: RunOptions) -> Path | None:
    """Where to write a run that replaces another one; None where there is no image to be kept
    until then."""
    if not options.overwrite:
        return None
    earlier = check_free(options.out, True, besides=besides(options))
    if earlier is None or not earlier.complete:
        return None
    return destination.place_beside(options.out)


def _replace_run(options: RunOptions, fresh: Path) -> None:
    """Put a run in the place of the earlier one if all of its images are finished."""
    try:
        images = read_record(fresh)[1].images
    except StoreError:  # it had not begun
        shutil.rmtree(fresh, ignore_errors=True)
        return
    if not images.missing:
        with reported(options.out, f"the new run stays in {fresh}"):
            final = real(options.out)
            destination.put_in_place(fresh, final, destination.RUN, besides(options))
    elif images.complete:
        log.warning(
            "%s stays as it was; what is done of the new run is in %s, where --resume goes on",
            quoted(str(options.out)),
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
