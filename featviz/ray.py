"""`featviz.ray.run`: the feature maps of images, drawn by workers of Ray, a shard each."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from msgspec import structs

from featviz.api.keywords import Layers, Model, Order, Pictures, as_files, keywords_of
from featviz.api.running import Run, RunImage, order_run
from featviz.errors import FeatvizError, UsageError
from featviz.options import ModelOptions, RunOptions
from featviz.records import ImageResult, RunResult, Shard
from featviz.run import run as pipeline
from featviz.run.prepare import check_options
from featviz.run.resume import check_destination
from featviz.run.run import stop_requests
from featviz.rundir import RUN_FILE
from featviz.rundir.schema import read_json
from featviz.text import quoted

NOT_OF_RAY = ("overwrite", "shard", "tensorboard")


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
) -> Run:
    """Draw the feature maps of images like `featviz.run`, by workers of Ray (extra `featviz[ray]`).

    Each worker loads the model and draws one shard of the images. Where one dies, Ray begins its
    shard again, which goes on with what is complete. The run directory is that of one process, byte
    for byte, if the versions and the number of threads are the same. The cluster is the one that
    this process is connected to, else that of RAY_ADDRESS, else a new one.

    Args:
        model, images, layers, resume, options: as for `featviz.run`, but for `shard` and
            `tensorboard`; paths are those of all machines, and a module is sent to each worker.
        out: the run directory, on a disk that all machines write to.
        cpus, gpus: of each worker, which has as many threads (Ray's `num_cpus` and `num_gpus`).

    Returns:
        The images, in their order. A signal ends all workers after their current image.

    Raises:
        FeatvizError: as from `featviz.run`; or Ray is missing, or a worker has died three times.
    """
    for name, value, least in (("workers", workers, 1), ("cpus", cpus, 0), ("gpus", gpus, 0)):
        if not value >= least:
            raise UsageError(f"{name}={value:g}: expected a number ≥ {least}")
    if wrong := [name for name in NOT_OF_RAY if options.get(name)]:
        raise UsageError(f"{wrong[0]} is not for workers of Ray", "leave it out")
    try:
        import ray
    except ImportError:
        raise UsageError("ray is not installed", "pip install 'featviz[ray]'") from None
    order = order_run(model, {**options, "resume": resume}, layers, out)
    check_options(order.options)
    with as_files(images) as files:
        check_destination(order.options)
        again = replace(order, options=structs.replace(order.options, resume=True))
        ray.init(ignore_reinit_error=True, log_to_driver=False)
        draw = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=2)(_draw)
        given_to_all = ray.put(again), files, Path.cwd()
        left = tasks = [draw.remote(Shard(n, workers), *given_to_all) for n in range(workers)]
        with stop_requests() as stop:
            try:
                while left and not stop.is_set():
                    done, left = ray.wait(left, timeout=0.2)  # seconds until a signal is heeded
                    for task in done:
                        _result(task)
            finally:
                for task in left:
                    ray.cancel(task)  # as by Ctrl-C: it ends after its current image
                ray.wait(tasks, num_returns=workers)
    results = [result for task in tasks if (result := _result(task)) is not None]
    rows = zip_longest(*(result.images for result in results))
    found = tuple(image for row in rows for image in row if image is not None)
    root = order.options.out
    # also those of a shard that was stopped before it began
    missing = tuple(read_json(root / RUN_FILE)["images"]["missing"]) if results else ()
    pictures = sum(result.pictures for result in results)
    images_done = tuple(RunImage.of(image, root) for image in found)
    return Run(root, images_done, missing, stop.is_set(), pictures)


def _draw(shard: Shard, order: Order[RunOptions], files: list[str], cwd: Path) -> RunResult:
    """Draw one shard, in a worker; relative paths begin in `cwd`."""
    os.chdir(cwd)
    done: list[ImageResult] = []
    options = structs.replace(order.options, shard=shard)
    with order.lent() as model:
        result = pipeline.run(model, files, options, lambda image, total: done.append(image))
    return replace(result, images=tuple(done))


def _result(task: Any) -> Any:
    """The result of a worker that has ended; None where it was stopped before it began."""
    import ray

    try:
        return ray.get(task)
    except ray.exceptions.TaskCancelledError:
        return None
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, FeatvizError) else error) from None
    except ray.exceptions.RayError as error:
        raise FeatvizError(
            f"a worker of Ray has died 3 times: {quoted(str(error).splitlines()[0])}",
            "what is complete stays complete, and resume=True goes on; is there enough memory?",
        ) from error
