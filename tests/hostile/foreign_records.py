"""Files named run.json that featviz did not write, and what one of its own holds."""

from __future__ import annotations

from typing import Any

RUN_RECORD = {
    "schema_version": 2,
    "featviz": "0.1.0",
    "torch": "2.6.0",
    "model": {},
    "layers": [],
    "options": {},
    "images": {"total": 0, "complete": []},
    "failures": [],
}

NOT_OURS: dict[str, Any] = {
    "no JSON": "{",
    "empty": "",
    "list": [],
    "another program's": {"name": "proj", "scripts": {}},
    "version only": {"schema_version": 2},
    "version is text": {**RUN_RECORD, "schema_version": "2"},
    "version is true": {**RUN_RECORD, "schema_version": True},
    "version is zero": {**RUN_RECORD, "schema_version": 0},
    "no featviz": {k: v for k, v in RUN_RECORD.items() if k != "featviz"},
    "no failures": {k: v for k, v in RUN_RECORD.items() if k != "failures"},
    "images is a list": {**RUN_RECORD, "images": ["a"]},
    "layers is text": {**RUN_RECORD, "layers": "conv1"},
    "another kind": {**RUN_RECORD, "kind": "benchmarks"},
    "deep": "[" * 100_000,
}
