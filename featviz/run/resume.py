"""Opens and locks the folder that a run is written into, decides whether an earlier run
there may go on, and writes run.json."""

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
    """Lock and open the folder that the run is written into: `out`, or, to replace an
    earlier run, a hidden folder that is renamed to `out` at the end. Other shards of the
    run may write into the folder at the same time.

    Args:
        options: must have passed `prepare.check_options`, so that `overwrite` and a shard
            never stand together.

    Raises:
        StoreError: another process writes into the folder, it holds files that are not of
            a run, or it cannot be written.
    """
    out = options.folder
    # A mount point cannot be renamed, nor can a folder whose parent may not be written.
    # There `open_run` removes the earlier run before the new one is written.
    can_rename = not real(out).is_mount() and os.access(real(out).parent, os.W_OK)
    if options.overwrite and can_rename and holds_run(out):
        with replacing(out, RUN) as new:
            yield new
        return
    with locks.held(out, options.shard):
        # `overwrite=True`: `open_run` refuses an earlier run later, when the layers are
        # known, so that the user learns of a misspelt layer first
        check_destination(options, overwrite=True)
        with reported(out):
            folder = Folder.open(out)
        with folder:
            yield folder


def check_destination(options: RunOptions, overwrite: bool) -> None:
    """Refuse, before the model is loaded, a folder that the run cannot be written into.

    Args:
        overwrite: whether the folder may hold an earlier run.

    Raises:
        StoreError: the folder holds files that are not of a run, or an earlier run
            without `overwrite`.
    """
    # `open_run` compares a run that is to go on with this one, when the layers are known
    may_join = options.resume or options.shard is not None
    if not (may_join and holds_run(options.folder)):
        check_free(options.folder, RUN, overwrite)


def alone_among_shards(options: RunOptions) -> AbstractContextManager[None]:
    """A context in which no other shard of the run opens the run directory, or writes
    run.json."""
    if options.shard is None:
        return nullcontext()
    return locks.among_shards(options.folder)


class RunDocument:
    """The content of run.json: the settings of the run, and the names and errors of its
    images."""

    def __init__(self, record: Mapping[str, Any], samples: Sequence[Sample]) -> None:
        """Begin with no image finished.

        Args:
            record: the settings of the run, from `run_record`.
            samples: the images of the whole run, all shards included.
        """
        self.record = dict(record)
        self.names = [sample.name for sample in samples]
        self.fingerprint = fingerprint(self.record)
        """SHA-256 of the settings. Images with the same fingerprint were drawn in the
        same way."""
        self.errors: dict[str, str | None] = {}
        """The error of each finished image, by the image's name; None for an image
        without an error."""
        self.failed = 0
        """How many images had failed when run.json was last written, those of other
        shards included."""

    def write(self, run: RunDirectory) -> list[str]:
        """Write run.json, and set `failed`. A shard must call this within
        `alone_among_shards`, since all shards share run.json.

        Returns:
            The names of the images that are neither complete nor failed.
        """
        # images that this process has not drawn may be complete, or may have failed, by
        # another shard or an earlier run
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
    """The settings of a run: everything that changes its pictures, and nothing else, so
    no time, place or number of threads. The fingerprint is made of these."""
    model = prepared.model
    options = prepared.options
    inputs = structs.asdict(options.inputs)
    # the entry `preprocessing` names these three
    for name in ("transform", "forward_args", "input"):
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
    """Open the run directory in a folder from `locked_destination`, and write run.json.
    With `resume`, or if other shards write there, the run that the folder holds goes on;
    otherwise an earlier run is removed.

    Args:
        folder: the folder from `locked_destination`.
        document: the run.json of this run; it is written before any image is drawn.
        samples: the images of this shard.

    Raises:
        StoreError: the folder holds a run with other settings, or files that this run may
            not replace.
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
        # A shard that finds no run.json is the first to begin: there is nothing to remove,
        # since `locked_destination` has refused a folder with other files.
        elif options.resume or options.shard is None:
            earlier = check_free(folder.path, RUN, options.overwrite)
            if earlier is not None:
                run.clear(earlier)
        if options.resume:
            _warn_of_surplus(run, document)
        # No process writes hidden folders of this shard's images, or of images that are
        # no longer inputs. Those of other shards are left alone: they may be at work.
        removed = set(run.before().names).difference(document.names)
        run.clear_images([*(sample.name for sample in samples), *removed])
        document.write(run)
    return run


def _warn_of_surplus(run: RunDirectory, document: RunDocument) -> None:
    """Warn of images in the run directory that are no longer inputs of the run."""
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
        document: the run.json of this run.
        record: the content of the run.json in the run directory.

    Raises:
        StoreError: the settings differ.
    """
    # `record` was read from JSON, so both have lists for tuples, and text for paths
    new = json.loads(json.dumps(document.record, default=str))
    different = differences(settings_of(record), new)
    if different:
        option = "--resume:" if options.resume else "--out"
        # Differences of options begin with "there". Other options also choose other
        # layers, so only the options are named then.
        reasons = [text for text in different if text.startswith("there ")] or different
        raise StoreError(
            f"{option} {options.folder} holds another run: {listed(reasons, 2, '; ')}",
            "give the same model and options, or another --out",
        )


def _check_shard_is_empty(
    run: RunDirectory, options: RunOptions, samples: Sequence[Sample]
) -> None:
    """Refuse to draw the images of a shard twice; StoreError if an image is complete.

    Args:
        samples: the images of the shard.
    """
    done = sum(run.is_complete(sample.name) for sample in samples)
    if done:
        raise StoreError(
            f"--out {options.folder} holds {counted(done, 'image')} of shard"
            f" {options.shard}",
            "--resume goes on with it, --out names another place",
        )
