"""Where a run is written: a place that no other run is written into, and that is hidden until the
run is whole where it replaces another run; run.json as it grows; images of an earlier run that can
be kept."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from featviz.errors import FeatvizError, ImageError, StoreError
from featviz.files import real
from featviz.files.urls import Url
from featviz.images import decode
from featviz.models.requirements import versions
from featviz.options import RunOptions
from featviz.records import ImageResult, Outcome, Sample
from featviz.run.prepare import Prepared, check_options
from featviz.rundir import RUN_FILE, store
from featviz.rundir import place as places
from featviz.rundir.atomic import reported
from featviz.rundir.place import (
    RUN,
    Earlier,
    check_free,
    clear_beside,
    hidden_beside,
    holds_run,
    put_in_place,
)
from featviz.rundir.read import differences, read_json, read_record
from featviz.rundir.schema import GROWING, Failure, convert, fingerprint
from featviz.rundir.write import ImageFolder, RunDirectory
from featviz.text import counted, listed, quoted, safe_way

log = logging.getLogger(__name__)


@contextmanager
def held(options: RunOptions) -> Iterator[None]:
    """No other process writes into the place of the run, but other shards of it."""
    check_options(options)
    out, shard = options.out, options.shard
    with store.held(out, shard) if isinstance(out, Url) else places.held(out, shard):
        yield


def together(options: RunOptions) -> AbstractContextManager[None]:
    """Be the only one of several shards that opens the place, or writes run.json."""
    if options.shard is None:
        return nullcontext()
    out = options.out
    return store.among_shards(out) if isinstance(out, Url) else places.among_shards(out)


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
            RunDirectory(out).clear(earlier.ours)
        yield out, options
        return
    fresh = hidden_beside(out)
    with in_any_case(partial(_replace_run, out, fresh)):
        yield fresh, structs.replace(options, resume=False, overwrite=False)


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


class RunDocument:
    """The content of run.json: what runs, and what became of the images."""

    def __init__(self, record: Mapping[str, Any], samples: Sequence[Sample]) -> None:
        """`samples` are those of the whole run, whichever process or shard takes them."""
        self.record = dict(record)
        self.names = [sample.name for sample in samples]
        self.errors: dict[str, str | None] = {}
        """The error of each finished image, by its name; None for one without."""
        self.missing: Collection[str] = ()
        """Images that are neither complete nor failed at the end."""
        self.failed = 0
        """How many images have failed by now, those of other shards included."""

    @property
    def fingerprint(self) -> str:
        """sha256 of the model and the options: what has the same was drawn in the same way."""
        return fingerprint(self.record)

    def write(self, run: RunDirectory) -> list[str]:
        """Write run.json, the images in their order, and return those that are missing.

        An earlier run or another shard may have left the manifests of other images, or their
        failures in run.json."""
        others = set(self.names) - self.errors.keys()
        errors: dict[str, str | None] = {}
        with suppress(StoreError, ValueError):
            rows = convert(read_json(run.root / RUN_FILE).get("failures"), list[Failure])
            errors = {row.image: row.error for row in rows if row.image in others}
        errors |= {name: None for name in others if run.image(name).is_complete}
        errors |= self.errors
        seen = [name for name in self.names if name in errors]
        missing = [name for name in self.names if name not in errors]
        images = {
            "total": len(self.names),
            "complete": [name for name in seen if errors[name] is None],
            "missing": missing,
        }
        failures = [
            {"image": name, "error": errors[name]} for name in seen if errors[name] is not None
        ]
        self.failed = len(failures)
        run.write_run({**self.record, "images": images, "failures": failures})
        return missing


def run_record(prepared: Prepared) -> dict[str, Any]:
    """All that decides what is drawn, and nothing else: no time, no place, no number of
    threads."""
    model = prepared.model
    return {
        **versions(),
        "device": model.device.type,
        "model": model.source,
        "preprocessing": model.preprocess.words,
        "layers": [layer.name for layer in prepared.layers],
        "options": recorded_options(prepared.options),
    }


def recorded_options(options: RunOptions) -> dict[str, Any]:
    """The options that decide what is drawn, as run.json has them."""
    inputs = structs.asdict(options.inputs)
    del inputs["transform"], inputs["forward_args"]  # which the preprocessing names
    return {
        "layers": options.layers,
        **structs.asdict(options.draw),
        "padding": options.draw.gap,
        "pad_value": options.draw.gap_grey,
        **inputs,
        **structs.asdict(options.passes),
    }


def check_destination(options: RunOptions) -> Earlier | None:
    """Say before the model is loaded that `out` cannot be written; the run that is there, and is to
    be replaced."""
    if isinstance(options.out, Url):
        if not options.resume and options.shard is None:
            with store.temporary(options.out.name) as folder:
                RunDirectory(folder, options.out).check_free()
        return None
    there = (options.resume or options.shard is not None) and holds_run(options.out)
    if there or (options.resume and RunDirectory(options.out).complete):
        return None
    return check_free(options.out, RUN, options.overwrite)


def open_run(
    folder: Path, prepared: Prepared, document: RunDocument, samples: Sequence[Sample]
) -> RunDirectory:
    """The run directory: a new one, or with `resume` the one that is there.

    Args:
        folder: the run directory, or for a run in a store the empty folder for files on their way.
        samples: the images of this shard, or of the whole run.
    """
    options = prepared.options
    with together(options):
        out = options.out
        run = RunDirectory.create(folder, out if isinstance(out, Url) else None)
        _join(run, options, document, samples)
        known = {safe_way(name) for name in document.names}
        complete = run.complete if options.resume else []
        if gone := [quoted(path) for path in complete if path not in known]:
            log.warning("%s: stays, though no longer among the inputs", listed(gone, 3))
        # hidden folders that no process is writing into
        run.clear_images([sample.name for sample in samples])
        document.write(run)
    return run


def _join(
    run: RunDirectory, options: RunOptions, document: RunDocument, samples: Sequence[Sample]
) -> None:
    """Refuse a run that cannot go on. Where run.json is missing or broken, an image that was drawn
    in the same way is enough: it is written anew. A shard joins the run that the others write, if
    that has none of this shard's images yet."""
    before = run.record()
    if before is not None and (options.resume or options.shard is not None):
        if document.record["model"].get("parameters", "") is None:
            raise StoreError(
                f"{options.out} holds a run, and this model's tensors do not tell their values",
                "--overwrite, or another --out",
            )
        old = {key: value for key, value in before.items() if key not in GROWING}
        if different := differences(old, json.loads(json.dumps(document.record, default=str))):
            where = f"{'--resume: ' if options.resume else '--out '}{options.out}"
            more = f" (and {len(different) - 1} more differences)" if different[1:] else ""
            raise StoreError(
                f"{where} holds another run; {different[0]}",
                f"give the same model and options, or another --out{more}",
            )
        done = sum(run.image(sample.name).is_complete for sample in samples)
        if done and not options.resume:
            raise StoreError(
                f"--out {options.out} holds {counted(done, 'image')} of shard {options.shard}",
                "--resume goes on with it, --out names another place",
            )
        return
    for path in run.complete if options.resume else ():
        with suppress(StoreError):
            if ImageFolder(run, path).manifest().fingerprint == document.fingerprint:
                log.warning("%s/%s is written anew from the manifests", options.out, RUN_FILE)
                return
    if options.resume or run.store is not None:
        run.check_free()


def kept(folder: ImageFolder, sample: Sample, fingerprint: str) -> ImageResult | None:
    """An image that is complete: its manifest is there, and fits the run and the file."""
    if not folder.is_complete:
        return None
    with suppress(StoreError, ImageError):
        manifest = folder.manifest()
        if manifest.fingerprint == fingerprint and manifest.image.sha256 == decode.digest(sample):
            rows, skipped = tuple(manifest.captures), tuple(manifest.skipped)
            said, idle = Outcome(tuple(manifest.prediction)), tuple(manifest.never_ran)
            name = folder.name
            return ImageResult(sample.name, name, rows, skipped, idle, outcome=said, kept=True)
    return None
