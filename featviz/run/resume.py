"""Where a run is written: a place that no other run is written into, hidden where it is
to replace another run; run.json as it grows; images of an earlier run that can be
kept."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from msgspec import structs

from featviz.errors import StoreError
from featviz.files import real
from featviz.models.requirements import versions
from featviz.options import RunOptions
from featviz.records import Sample
from featviz.run.prepare import Prepared
from featviz.rundir import locks
from featviz.rundir.folder import Folder, reported
from featviz.rundir.ownership import holds_run
from featviz.rundir.place import RUN, check_free, replacing
from featviz.rundir.schema import differences, fingerprint, settings_of
from featviz.rundir.write import RunDirectory
from featviz.text import counted, listed, quoted, safe_path

log = logging.getLogger(__name__)


@contextmanager
def locked_destination(options: RunOptions) -> Iterator[Folder]:
    """Lock the folder that the run is written into, and open it. Where `out` holds a run
    that is to be replaced, it is a hidden folder, which takes the place of `out` at the
    end; else it is `out`. Other shards of the run may write there meanwhile.

    Args:
        options: let pass by `prepare.check_options`, so never `overwrite` with a shard.

    Raises:
        StoreError: another process writes it, it holds something else, or it cannot be
            written.
    """
    out = options.folder
    # a mount point, or a folder in one that may not be written, cannot be renamed: its
    # earlier run is removed before the new one is written
    can_rename = not real(out).is_mount() and os.access(real(out).parent, os.W_OK)
    if options.overwrite and can_rename and holds_run(out):
        with replacing(out, RUN) as new:
            yield new
        return
    with locks.held(out, options.shard):
        # an earlier run is refused by `open_run`, when the layers are known: a misspelt
        # one is to be named first
        check_destination(options, overwrite=True)
        with reported(out):
            folder = Folder.open(out)
        with folder:
            yield folder


def check_destination(options: RunOptions, overwrite: bool) -> None:
    """Refuse, before the model is loaded, a place that cannot be written.

    Args:
        overwrite: whether an earlier run may be there.

    Raises:
        StoreError: something else is there, or an earlier run that may not.
    """
    # a run that is there is compared later, when the layers are known
    there = (options.resume or options.shard is not None) and holds_run(options.folder)
    if not there:
        check_free(options.folder, RUN, overwrite)


def alone_among_shards(options: RunOptions) -> AbstractContextManager[None]:
    """A block in which no other shard of the run opens the run directory, or writes
    run.json."""
    if options.shard is None:
        return nullcontext()
    return locks.among_shards(options.folder)


class RunDocument:
    """The content of run.json: what runs, and what became of the images."""

    def __init__(self, record: Mapping[str, Any], samples: Sequence[Sample]) -> None:
        """Begin with no image finished.

        Args:
            record: from `run_record`: what decides how images are drawn, without the
                images.
            samples: of the whole run, whichever process or shard takes them.
        """
        self.record = dict(record)
        self.names = [sample.name for sample in samples]
        self.fingerprint = fingerprint(self.record)
        """sha256 of the model and the options: what has the same was drawn in the same
        way."""
        self.errors: dict[str, str | None] = {}
        """The error of each finished image, by its name; None for one without."""
        self.failed = 0
        """Images that have failed by now, those of other shards included."""

    def write(self, run: RunDirectory) -> list[str]:
        """Write run.json, the images in their order, and count in `failed`. A shard does so within
        `alone_among_shards`, since run.json is that of all shards.

        Returns:
            The names of the images that are missing.
        """
        # another shard or an earlier run may have left manifests of images that are not
        # of this process, or failures in run.json
        earlier_errors = run.before().errors
        complete = []
        failures = []
        missing = []
        for name in self.names:
            error = self.errors.get(name)
            is_finished = name in self.errors or run.is_complete(name)
            if not is_finished:
                error = earlier_errors.get(name)
            if error is not None:
                failures.append({"image": name, "error": error})
            elif is_finished:
                complete.append(name)
            else:
                missing.append(name)
        images = {"total": len(self.names), "complete": complete, "missing": missing}
        self.failed = len(failures)
        run.write_run({**self.record, "images": images, "failures": failures})
        return missing


def run_record(prepared: Prepared) -> dict[str, Any]:
    """All that decides what is drawn, and nothing else: no time, place or number of
    threads."""
    model = prepared.model
    options = prepared.options
    # A fingerprint is made of this: what does not change pictures may not be in it,
    # and what does may not be missing.
    inputs = structs.asdict(options.inputs)
    for name in ("transform", "forward_args", "input"):  # which the preprocessing names
        del inputs[name]
    return {
        **versions(),
        "device": model.device.type,
        "model": model.source,
        "preprocessing": model.preprocess.words_for(),
        "layers": [layer.name for layer in prepared.layers],
        "options": {
            "layers": options.layers,
            **structs.asdict(options.draw),
            "padding": options.draw.gap,
            "pad_value": options.draw.gap_grey,
            **inputs,
            **structs.asdict(options.passes),
        },
    }


def open_run(
    folder: Folder, prepared: Prepared, document: RunDocument, samples: Sequence[Sample]
) -> RunDirectory:
    """The run directory from `locked_destination`: a new one, the one that is there
    with `resume`, or the one that other shards write.

    Args:
        document: of this run; it is written before any image is drawn.
        samples: the images of this shard.

    Raises:
        StoreError: the folder holds something that this run may not go on with, or
            replace.
    """
    options = prepared.options
    with alone_among_shards(options):
        run = RunDirectory(folder, options.mirror)
        record = run.record()
        may_join = options.resume or options.shard is not None
        if record is not None and may_join:
            _check_same(options, document, record)
            if not options.resume:
                _check_shard_is_empty(run, options, samples)
        # a shard that finds no run.json may be the first of several: what it may write
        # beside, `locked_destination` has checked
        elif options.resume or options.shard is None:
            earlier = check_free(folder.path, RUN, options.overwrite)
            if earlier is not None:
                run.clear(earlier)
        if options.resume:
            _warn_of_surplus(run, document)
        # hidden folders that no process is writing into: of this shard's images, and of
        # those that are not inputs any more; other shards may be writing theirs
        removed = set(run.before().names).difference(document.names)
        run.clear_images([*(sample.name for sample in samples), *removed])
        document.write(run)
    return run


def _warn_of_surplus(run: RunDirectory, document: RunDocument) -> None:
    """Warn of images that an earlier run drew, and this one does not have."""
    names = {safe_path(name) for name in document.names}
    surplus = [quoted(path) for path in run.complete if path not in names]
    if surplus:
        verb = "is" if len(surplus) == 1 else "are"
        log.warning(
            "%s %s kept, though no longer among the inputs", listed(surplus, 3), verb
        )


def _check_same(
    options: RunOptions, document: RunDocument, record: Mapping[str, Any]
) -> None:
    """Refuse to go on with a run that had other settings.

    Args:
        document: of this run.
        record: the content of the run.json that is there.

    Raises:
        StoreError: they differ in what decides how images are drawn.
    """
    # as JSON has it, which the other one was read from: lists for tuples, text for paths
    new = json.loads(json.dumps(document.record, default=str))
    different = differences(settings_of(record), new)
    if different:
        option = "--resume:" if options.resume else "--out"
        # other options choose other layers, which is no news beside them
        reasons = [text for text in different if text.startswith("there ")] or different
        raise StoreError(
            f"{option} {options.folder} holds another run: {listed(reasons, 2, '; ')}",
            "give the same model and options, or another --out",
        )


def _check_shard_is_empty(
    run: RunDirectory, options: RunOptions, samples: Sequence[Sample]
) -> None:
    """Refuse to draw the images of a shard twice: StoreError where one is complete."""
    done = sum(run.is_complete(sample.name) for sample in samples)
    if done:
        raise StoreError(
            f"--out {options.folder} holds {counted(done, 'image')} of shard"
            f" {options.shard}",
            "--resume goes on with it, --out names another place",
        )
