"""`featviz.ray.run`: the feature maps of images, drawn by actors of Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

from featviz import pipeline
from featviz.api.keywords import Layers, Model, Picture, RunKeywords
from featviz.api.lending import as_files, selectors
from featviz.api.results import Run, RunImage
from featviz.api.running import read_order
from featviz.api.words import keyword_errors
from featviz.errors import UsageError
from featviz.files.urls import Url, is_url
from featviz.pipeline.actors import Crew
from featviz.records import ImageResult
from featviz.text import quoted


@keyword_errors()
def run(
    model: Model,
    images: Picture | list[Picture] | tuple[Picture, ...],
    out: str | Path,
    layers: Layers | None = None,
    *,
    actors: int = 2,
    cpus: float = 1,
    gpus: float = 0,
    overwrite: bool = False,
    resume: bool = False,
    **options: Unpack[RunKeywords],
) -> Run:
    """Draw the feature maps of images like `featviz.run`, by actors of Ray (extra `featviz[ray]`).

    Each actor holds the model and draws a few images at a time; where one dies, another draws its
    images. The run directory is that of one process, byte for byte, if the versions and the number
    of threads are the same. The cluster is the one that this process is connected to, else the one
    that RAY_ADDRESS names, else one that is started on this machine.

    Args:
        model: as for `featviz.run`; a module is sent to each actor, which has a copy.
        images: as for `featviz.run`: paths that all machines have, or URLs. What is in memory
            becomes files of this machine.
        out: the run directory, on a disk that all machines write to.
        layers: as for `featviz.run`.
        actors: how many there are.
        cpus: cores of each actor, which are its threads (Ray's `num_cpus`).
        gpus: GPUs of each actor, or a share of one (Ray's `num_gpus`); with 0 it sees none. This
            process loads the model, too, and needs the same kind of device.
        overwrite: replace a run that is there.
        resume: go on with the same run that is there.
        options: as for `featviz.run`, but for `shard` and `tensorboard`.

    Returns:
        The images, in their order, and what was drawn of each.

    Raises:
        FeatvizError: as from `featviz.run`; or Ray is missing, or an actor has other versions.

    Example:
        >>> import featviz.ray
        >>> featviz.ray.run("resnet18", "photos/", "maps", actors=4)  # doctest: +SKIP
        <Run of 100 images: 1700 pictures>
    """
    given: dict[str, Any] = dict(options)
    if given.get("shard") is not None:
        raise UsageError("--shard divides what Ray divides already", "leave it out")
    if is_url(out):
        raise UsageError(
            f"--out {quoted(str(Url(str(out))))} is a URL, and actors write into one folder",
            "give a folder of a disk that all machines share",
        )
    for_run = {"layers": selectors(layers), "out": out, "overwrite": overwrite, "resume": resume}
    asked, lend = read_order(model, given, for_run)
    crew = Crew(lend, actors, cpus, gpus)
    crew.check()
    finished: list[ImageResult] = []

    def note(image: ImageResult, total: int) -> None:
        finished.append(image)

    with as_files(images) as files, lend() as source:
        result = pipeline.run(source, files, asked, note, others=crew)
    done = tuple(RunImage.of(image, result.out, None) for image in finished)
    return Run(result, done, None)
