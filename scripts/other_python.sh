#!/usr/bin/env bash
# Print the path of the newest other Python from 3.11 to 3.13 that this machine has (on the PATH, or
# pyenv's), or of python3 where there is none.
set -euo pipefail

here=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
for version in 3.13 3.12 3.11; do
  [ "$version" = "$here" ] && continue
  for python in "$(command -v "python$version")" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
    # a shim of pyenv is there without its Python
    "$python" -c 'import sys; print(sys.executable)' 2>/dev/null && exit
  done
done
command -v python3
