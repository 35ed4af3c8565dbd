"""The audit of a model that is being trained: planned once, made again and again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from featviz.audit import model_audit, output
from featviz.audit.findings import judged_rows
from featviz.audit.model_audit import AuditRequest, ModelVisit
from featviz.audit.plan import choose
from featviz.errors import UsageError
from featviz.models.load import LoadedModel
from featviz.models.preprocess import InputOptions
from featviz.records import Layer, Sample
from featviz.text import listed

_TOGETHER = 16
"""Images that go through together at most."""


class HealthCheck:
    """Counts what the channels of some layers do for the same images, whenever it is asked."""

    def __init__(
        self,
        model: LoadedModel,
        samples: Sequence[Sample],
        layers: Sequence[Layer],
        inputs: InputOptions,
        blank: Sequence[Any],
    ) -> None:
        """Choose where each layer is judged, by a forward pass on `blank`.

        Raises:
            UsageError: all layers are functions, or none gives a tensor with channels.
            ForwardError: the model cannot take `blank`.
        """
        names = [re.escape(layer.name) for layer in layers if not layer.is_function]
        if not names:
            raise UsageError(
                "channels are judged of modules, and all layers are functions: "
                + listed([layer.name for layer in layers], 3)
            )
        self._samples = samples
        self._asked = AuditRequest(f"re:^({'|'.join(names)})$", inputs, _TOGETHER)
        self._plan = choose(model, self._asked.layers, blank)

    def write(self, model: LoadedModel, folder: Path) -> Mapping[str, Any]:
        """Audit the model as it is now, and write audit.json into a folder.

        Returns:
            The content of audit.json.

        Raises:
            FeatvizError: not one image went through, or the file cannot be written.
        """
        visit = ModelVisit(model, self._samples, self._asked, lambda image, error, total: None)
        counted = visit.count(self._plan)
        rows = judged_rows(self._plan, counted, self._asked.thresholds)
        document = model_audit.documented(visit, self._plan, counted, rows)
        output.write_document(folder, document)
        return document
