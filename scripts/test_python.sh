#!/usr/bin/env bash
# The quick tests under the newest other Python from 3.11 to 3.14 of this machine: on the PATH, or pyenv's.
# None is no failure. Needs uv (pip install uv).
set -euo pipefail
cd "$(dirname "$0")/.."

here=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
for version in 3.14 3.13 3.12 3.11; do
  [ "$version" = "$here" ] && continue
  for python in "$(command -v "python$version")" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
    # a shim of pyenv is there without its Python
    "$python" -c 'import sys' 2>/dev/null && break 2
    python=
  done
done
if [ -z "${python:-}" ]; then
  echo "no other Python from 3.11 to 3.14 is here; no tests under one" >&2
  exit 0
fi

echo "+ the quick tests under $("$python" --version), $python" >&2
other=$(mktemp -d)
trap 'rm -rf "$other"' EXIT
uv venv --quiet --python "$python" "$other"
uv pip install --quiet --python "$other/bin/python" --editable '.[test]'
"$other/bin/python" -m pytest -q -n 2 --dist worksteal -m "not slow" "$@" ||
  "$other/bin/python" -m pytest -q --last-failed --last-failed-no-failures none # as .ci/run does
