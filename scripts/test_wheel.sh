#!/usr/bin/env bash
# Install a wheel alone in a fresh environment, of the newest other Python that this machine has and the
# lowest versions that pyproject.toml admits, and use it in a folder outside the clone: a run of a
# torchvision model with random weights, its report, and an audit. Needs uv (pip install uv).
#
#   scripts/test_wheel.sh featviz-0.1.0-py3-none-any.whl ENVIRONMENT
set -euo pipefail
wheel=$(realpath "$1")
environment=$(realpath "$2")
cd "$(dirname "$0")/.."
photo=$PWD/sample_images/scenes/spheres.jpg

if python3 -m zipfile --list "$wheel" | awk 'NR > 1 {print $1}' | sort | uniq -d | grep .; then
  echo "the wheel holds these files twice" >&2
  exit 1
fi
if python3 -m zipfile --list "$wheel" | grep -E '^(tests|benchmarks|scripts|docs)/'; then
  echo "the wheel holds more than the package" >&2
  exit 1
fi

uv venv --quiet --python "$(scripts/other_python.sh)" "$environment"
uv pip install --quiet --compile-bytecode --python "$environment" --resolution lowest-direct "$wheel"
featviz=$environment/bin/featviz
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"$featviz" run resnet18 --weights none "$photo" --layers 'layer1.*' --size 64 --out maps
"$featviz" report maps
"$featviz" audit resnet18 --weights none "$photo" --size 64 --out audit
test -s maps/spheres.jpg/manifest.json && test -s maps/report/index.html && test -s audit/audit.json
echo "the wheel works: $(basename "$wheel")"
