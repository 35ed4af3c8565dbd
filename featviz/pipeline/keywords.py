"""The options of a run from keywords: those of the command line, with underscores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from featviz.gradients.options import read_options
from featviz.models.load import ModelOptions
from featviz.models.preprocess import InputOptions
from featviz.pipeline.options import RunOptions
from featviz.pipeline.processes import parse_shard
from featviz.records import INTERVENTIONS, DrawOptions, Limits, PassOptions
from featviz.records.checking import filled, no_option
from featviz.text import parse_bytes

_OF_THE_RUN = {"archive", "durable", "fail_fast", "jobs", "prune", "step", "verify", "wait"}
_LIMITS = {"max_output_size": "bytes", "max_files": "files"}
_PASSING = {"capture", "target", "grad_rule", *(kind.replace("-", "_") for kind in INTERVENTIONS)}
"""The options that are gradients and interventions."""


def names_of(kind: type) -> set[str]:
    """The names of a record's fields that are keywords: the MODEL itself is none, and further
    arguments of forward come as objects."""
    return {field.name for field in fields(kind)} - {"spec", "input"}


_KEYWORDS = {
    *_OF_THE_RUN,
    *_LIMITS,
    *_PASSING,
    "shard",
    *(name for kind in (DrawOptions, InputOptions, ModelOptions) for name in names_of(kind)),
}
"""Every keyword that `featviz.run` takes for the options of a run or of its model."""


def take(options: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Those of the options that have these names; they are removed."""
    return {name: options.pop(name) for name in list(options) if name in names}


def read_keywords(options: dict[str, Any], seed: Any, given: Mapping[str, Any]) -> RunOptions:
    """The options of a run, from keywords whose options of the model were taken away.

    Args:
        options: fields of DrawOptions and InputOptions, and the names above; emptied.
        seed: from which interventions draw noise.
        given: fields of RunOptions.

    Raises:
        UsageError: a keyword that does not exist, or a bad value.
    """
    passing = {"capture": "output", **take(options, _PASSING), "seed": seed}
    passing["reduce"] = options.get("reduce")
    records = {
        "draw": filled(DrawOptions, take(options, names_of(DrawOptions))),
        "inputs": filled(InputOptions, take(options, names_of(InputOptions))),
        "passes": filled(PassOptions, vars(read_options(passing))),
        "limits": filled(Limits, _limits(take(options, set(_LIMITS)))),
    }
    run, shard = take(options, _OF_THE_RUN), options.pop("shard", None)
    if options:
        raise no_option(options, {*_KEYWORDS, *given})
    read = filled(RunOptions, {**given, **run, **records})
    return replace(read, shard=parse_shard(str(shard)) if shard is not None else None)


def _limits(given: Mapping[str, Any]) -> dict[str, Any]:
    limits = {_LIMITS[name]: value for name, value in given.items()}
    if isinstance(limits.get("bytes"), str):
        limits["bytes"] = parse_bytes(limits["bytes"])
    return limits
