"""`featviz.ray.run`: the feature maps of images, drawn by workers of Ray, a shard each."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from featviz.api.keywords import Layers, Model, Pictures, Request, as_files, keywords_of
from featviz.api.running import read_run_request
from featviz.errors import FeatvizError, UsageError
from featviz.options import ModelOptions, RunOptions
from featviz.records import Shard
from featviz.run import run as pipeline
from featviz.run.prepare import check_options
from featviz.run.results import ImageResult, RunResult
from featviz.run.resume import check_destination
from featviz.run.run import stop_requests
from featviz.rundir import RUN_FILE
from featviz.rundir.schema import read_json
from featviz.text import first_line, quoted

NOT_OF_RAY = ("overwrite", "shard", "tensorboard")
_SIGNAL_PAUSE = 0.2
"""Seconds until a signal is heeded."""


@keywords_of(RunOptions, ModelOptions, but=NOT_OF_RAY)
def run(
    model: Model,
    images: Pictures,
    layers: Layers | None = None,
    out: str | Path = "featviz-out",
    *,
    workers: int = 2,
    cpus: float = 1,
    gpus: float = 0,
    resume: bool = False,
    **options: Any,
) -> RunResult:
    """Draw the feature maps of images like `featviz.run`, by workers of Ray (extra
    `featviz[ray]`).

    Each worker loads the model and draws one shard of the images. Where one dies, Ray
    begins its shard again, which goes on with what is complete. The run directory is
    that of one process, byte for byte, if the versions and the number of threads are
    the same. The cluster is the one that this process is connected to, else that of
    RAY_ADDRESS, else a new one.

    Args:
        model, images, layers, resume, options: as for `featviz.run`, but for `shard`
            and `tensorboard`; all machines must have the same paths. A module is sent to
            each worker.
        out: the run directory, on a disk that all machines write to.
        cpus, gpus: of each worker, which has as many threads (Ray's `num_cpus` and
            `num_gpus`).

    Returns:
        The images, in their order. A signal ends all workers after their current image.

    Raises:
        FeatvizError: as from `featviz.run`; or Ray is missing, or a worker has died
            three times.
    """
    _check_number("workers", workers, 1)
    _check_number("cpus", cpus, 0)
    _check_number("gpus", gpus, 0)
    for name in NOT_OF_RAY:
        if options.get(name):
            raise UsageError(f"{name} is not for workers of Ray", "leave it out")
    try:
        import ray
    except ImportError:
        raise UsageError("ray is not installed", "pip install 'featviz[ray]'") from None
    request = read_run_request(model, {**options, "resume": resume}, layers, out)
    check_options(request.options)
    with as_files(images) as files:
        check_destination(request.options, request.options.overwrite)
        # a caller's own connection is used; workers' lines would mix with progress
        ray.init(ignore_reinit_error=True, log_to_driver=False)
        draw = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=2)(_draw_shard)
        # put once: a module among the options may have gigabytes
        request_of_all = ray.put(request)
        shards = [Shard(index, workers) for index in range(workers)]
        tasks = [
            draw.remote(shard, request_of_all, files, Path.cwd()) for shard in shards
        ]
        interrupted = _wait(tasks)
    results = [result for result in map(_result, tasks) if result is not None]
    return _joined(request.options.folder, results, interrupted)


def _check_number(name: str, value: float, minimum: int) -> None:
    """Refuse a parameter below its minimum; UsageError for this, and for NaN."""
    if not value >= minimum:
        raise UsageError(f"{name}={value:g}: expected a number ≥ {minimum}")


def _wait(tasks: list[Any]) -> bool:
    """Wait for all workers, and return whether a signal ended them. If a worker fails, the
    others are stopped, and its error is raised when they have ended."""
    import ray

    with stop_requests() as stop:
        running = tasks
        try:
            while running and not stop.is_set():
                done, running = ray.wait(running, timeout=_SIGNAL_PAUSE)
                for task in done:
                    _result(task)
        finally:
            for task in running:
                # as by Ctrl-C: the worker ends after its current image
                ray.cancel(task)
            ray.wait(tasks, num_returns=len(tasks))
        return stop.is_set()


def _joined(root: Path, results: list[RunResult], interrupted: bool) -> RunResult:
    """The result of one run over the images of all shards, in the order of the images.

    Args:
        root: the run directory.
        results: the results of the shards.
        interrupted: whether a signal stopped the run.
    """
    # each shard has only some images, but the names of all images of the run in order
    names: dict[str, None] = {}
    drawn: dict[str, ImageResult] = {}
    for result in results:
        names.update(dict.fromkeys(result.names))
        drawn.update({image.name: image for image in result.images})
    missing: list[str] = []
    if results:
        # from run.json, which also has the images of a shard that never began
        missing = read_json(root / RUN_FILE)["images"]["missing"]
    return RunResult(
        root,
        images=tuple(drawn[name] for name in names if name in drawn),
        missing=tuple(missing),
        interrupted=interrupted,
        pictures=sum(result.pictures for result in results),
        names=tuple(names),
    )


def _draw_shard(
    shard: Shard, request: Request[RunOptions], files: list[str], cwd: Path
) -> RunResult:
    """Draw one shard, in a worker.

    Args:
        request: the model, and the options of the whole run.
        files: all images of the run, as on the command line.
        cwd: the folder where relative paths begin. It becomes the current folder of the
            worker.

    Returns:
        The result of the shard. Its images have their predictions and skipped tensors,
        which the result of `pipeline.run` lacks, but no rows.
    """
    os.chdir(cwd)
    images: list[ImageResult] = []
    # `resume`: if Ray restarts a shard, it goes on after its complete images
    options = structs.replace(request.options, shard=shard, resume=True)

    def keep(image: ImageResult, total: int) -> None:
        """Keep the result of an image, without its rows."""
        images.append(replace(image, rows=()))

    with request.borrowed() as model:
        result = pipeline.run(model, files, options, keep)
    return replace(result, images=tuple(images))


def _result(task: Any) -> Any:
    """The result of a worker that has ended; None if it was stopped before it began.

    Raises:
        FeatvizError: the worker raised it, or the worker has died three times.
    """
    import ray

    try:
        return ray.get(task)
    except ray.exceptions.TaskCancelledError:
        return None
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, FeatvizError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise FeatvizError(
            f"a worker of Ray has died 3 times: {quoted(first_line(error))}",
            "what is complete stays complete, and resume=True goes on; is there enough"
            " memory?",
        ) from error
