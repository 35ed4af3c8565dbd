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
    takes the place of another run when it is whole; one for files on their way to a store. A team
    that torchrun has started again goes on where it was."""
    if options.url is not None:
        with temporary(options.url.name) as folder:
            yield replace(options, out=folder, resume=options.resume or team.begun is not None)
        return
    if options.archive is not None:
        with _packed(options, options.archive, team) as inside:
            yield inside
        return
    fresh, resume = team.at_first(partial(_beside, options, team.begun))
    if fresh is None:
        yield replace(options, resume=resume, overwrite=options.overwrite and not resume)
        return
    inside = replace(options, out=fresh, resume=resume, overwrite=False)
    with in_any_case(partial(_replace_run, options, fresh, team) if team.first else lambda: None):
        yield inside


@contextmanager
def _packed(options: RunOptions, target: Path, team: World) -> Iterator[RunOptions]:
    """A hidden folder, which is packed at the end, whatever it holds by then."""
    resume = options.resume or team.begun is not None
    room = partial(archive.room_for_archive, target, options.overwrite, resume)
    out = team.at_first(room) / archive.ROOM
    inside = replace(options, out=out, resume=resume, overwrite=False)
    with in_any_case(partial(_pack, inside.out, target, team) if team.first else lambda: None):
        yield inside


def _pack(root: Path, target: Path, team: World) -> None:
    if (root / RUN_FILE).is_file():
        if team.may_restart and read_record(root)[1].images.missing:
            log.warning("the run is in %s, where it goes on", quoted(str(root)))
            return
        try:
            archive.pack(root, target)
        except FeatvizError:
            words = "the run stays in %s; --resume with the same --archive goes on and packs it"
            log.warning(words, quoted(str(root)))
            raise
    archive.clear_room(root.parent)
    shutil.rmtree(root.parent, ignore_errors=True)


def _beside(options: RunOptions, begun: Path | None) -> tuple[Path | None, bool]:
    """Where to write a run that replaces another one, None where there is no image to be kept
    until then; and whether to go on with what is there.

    Args:
        begun: the folder that this team wrote before it was started again.
    """
    if begun is not None and begun.is_dir():
        return (None if begun == options.out else begun), True
    if not options.overwrite:
        return None, options.resume
    destination.clear_beside(options.out)
    earlier = check_free(options.out, True, besides=besides(options))
    if earlier is None or not earlier.complete:
        return None, False
    return destination.place_beside(options.out), False


def _replace_run(options: RunOptions, fresh: Path, team: World) -> None:
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
            team.begin(options.out)
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
