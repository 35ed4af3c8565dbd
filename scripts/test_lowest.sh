#!/usr/bin/env bash
# The quick tests under the lowest versions that pyproject.toml admits, in an environment of their
# own: what its bounds promise is true. Needs uv (pip install uv).
set -euo pipefail
cd "$(dirname "$0")/.."

lowest=$(mktemp -d)
trap 'rm -rf "$lowest"' EXIT
uv venv --quiet --python "$(command -v python3)" "$lowest"
uv pip install --quiet --python "$lowest/bin/python" --resolution lowest-direct --editable '.[test]'
"$lowest/bin/python" -m pytest -q -n 2 --dist worksteal -m "not slow" "$@" ||
  "$lowest/bin/python" -m pytest -q --last-failed --last-failed-no-failures none # as .ci/run does
