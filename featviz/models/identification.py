"""The story of `identify`: a file's tensors, freed of what surrounds them, and whose they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featviz.models.files import checkpoint
from featviz.models.files.state_dict import stripped_forms, unwrap
from featviz.models.identify import Known, identify_forms


@dataclass(frozen=True)
class Identification:
    """What a file of weights is."""

    file: str
    found: Known

    @property
    def known(self) -> bool:
        """Whether an architecture fits entirely."""
        return self.found.name is not None

    @property
    def words(self) -> str:
        """For people."""
        steps = [*self.found.form.steps, f"{len(self.found.form.tensors)} tensors"]
        return f"{self.file}: {'; '.join([*steps, self.found.words])}"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        found = self.found
        return {
            "file": self.file,
            "steps": list(found.form.steps),
            "tensors": len(found.form.tensors),
            "architecture": found.name,
            "also": list(found.names[1:]),
            "num_classes": found.num_classes,
            "nearest": [vars(near) for near in found.nearest],
        }


def identify_file(
    path: Path, key: str | None = None, prefix: str | None = None, ema: bool | None = None
) -> Identification:
    """Identify a file of weights.

    Raises:
        LoadError: no checkpoint, or no weights in it.
    """
    found = unwrap(checkpoint.read(path), key, prefix, ema, path.name)
    return Identification(path.name, identify_forms(stripped_forms(found)))
