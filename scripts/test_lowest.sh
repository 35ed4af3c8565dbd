#!/usr/bin/env bash
# The quick tests under the lowest versions that pyproject.toml admits, and the newest other Python that
# this machine has: what the bounds promise is true. Needs uv (pip install uv).
#
#   scripts/test_lowest.sh [ENVIRONMENT]     (a temporary one by default)
set -euo pipefail
cd "$(dirname "$0")/.."

environment=${1:-$(mktemp -d)}
[ $# = 1 ] || trap 'rm -rf "$environment"' EXIT
python=$environment/bin/python
[ -e "$python" ] || uv venv --quiet --python "$(scripts/other_python.sh)" "$environment"
uv pip install --quiet --compile-bytecode --python "$python" --resolution lowest-direct --editable '.[test]'
echo "+ the quick tests under $("$python" --version) and the lowest versions" >&2
"$python" -m pytest -q -n 2 --dist worksteal -m "not slow" ||
  "$python" -m pytest -q --last-failed --last-failed-no-failures none # as .ci/run does
