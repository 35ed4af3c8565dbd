"""One PCA basis for each layer, for all images of a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from featviz.drawing.reduce import Basis, Moments
from featviz.errors import ForwardError, ImageError, UsageError
from featviz.gradients import forward_backward
from featviz.hooks.eval_mode import in_eval_mode
from featviz.layout import to_maps
from featviz.pipeline.options import RunOptions
from featviz.pipeline.prepare import Prepared, read_input
from featviz.records import Sample, Site
from featviz.rundir import BASES_FILE
from featviz.rundir.arrays import read_arrays
from featviz.rundir.write import RunDirectory

MOST_IMAGES = 16
"""Images, evenly spread over those of a run, from which a shared basis is made."""


def write_bases(store: RunDirectory, prepared: Prepared) -> None:
    """Put the bases (for each layer float64 [4, C]: the mean and three loadings) into the run
    directory, if they are wanted and not there: a run that is
    resumed goes on with those it began with, whatever images were added."""
    if prepared.options.draw.shared_basis and not store.brought(BASES_FILE).is_file():
        bases = learn(prepared)
        tables = {key: np.vstack([basis.mean, basis.loadings]) for key, basis in bases.items()}
        with store.writing(BASES_FILE) as file:
            np.savez(file, **tables)  # type: ignore[arg-type]


def read_bases(store: RunDirectory, options: RunOptions) -> dict[str, Basis]:
    """The bases of a run, by `Site.stats_key`; none where each image has its own.

    Raises:
        StoreError: they cannot be read.
    """
    if not options.draw.shared_basis:
        return {}
    arrays = read_arrays(store.brought(BASES_FILE))
    tables = {key: torch.tensor(table) for key, table in arrays.items()}
    return {key: Basis(table[0], table[1:]) for key, table in tables.items()}


def learn(prepared: Prepared) -> dict[str, Basis]:
    """Principal components over up to 16 images, evenly spread over those of the run, pixel by
    pixel; images that fail are left out."""
    moments: dict[str, Moments] = {}
    with in_eval_mode(prepared.model.module, prepared.options.passes.gradients):
        for sample in _spread(prepared.samples):
            try:
                seen = _moments(sample, prepared)
            except (ImageError, ForwardError, UsageError):
                continue
            for key, sums in seen.items():
                before = moments.setdefault(key, sums)
                if before is not sums and len(before.total) == len(sums.total):
                    before.merge(sums)
    return {key: sums.basis() for key, sums in moments.items()}


def _spread(samples: Sequence[Sample]) -> list[Sample]:
    places = np.linspace(0, len(samples) - 1, min(MOST_IMAGES, len(samples)))
    return [samples[round(place)] for place in places]


def _moments(sample: Sample, prepared: Prepared) -> dict[str, Moments]:
    """The sums of each layer, by `Site.stats_key`, over the maps of one image.

    Raises:
        ImageError: the image cannot be read.
        ForwardError: the model cannot take it.
        UsageError: it has no such target.
    """
    model, moments = prepared.model, dict[str, Moments]()
    _, args = read_input(sample, model.preprocess, prepared.options.inputs)
    book = prepared.hint_book(args)

    def sink(site: Site, tensor: Tensor) -> None:
        maps = to_maps(tensor, book.at(site, tensor))[""]
        if not maps.strip:
            channels = len(maps.data)
            sums = moments.setdefault(site.stats_key, Moments(channels))
            if len(sums.total) == channels:
                sums.add(maps.data)

    forward_backward.run(model, prepared.plan, args, book, prepared.layers, sink)
    return moments
