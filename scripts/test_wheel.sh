#!/usr/bin/env bash
# Use a wheel that was installed alone in a fresh environment, in a folder outside the clone: a run of a
# torchvision model with random weights, its report, and an audit.
#
#   scripts/test_wheel.sh featviz-0.1.0-py3-none-any.whl ENVIRONMENT
set -euo pipefail
wheel=$(realpath "$1")
featviz=$(realpath "$2")/bin/featviz
photo=$(realpath "$(dirname "$0")/../sample_images/scenes/spheres.jpg")

if python3 -m zipfile --list "$wheel" | awk 'NR > 1 {print $1}' | sort | uniq -d | grep .; then
  echo "the wheel holds these files twice" >&2
  exit 1
fi
if python3 -m zipfile --list "$wheel" | grep -E '^(tests|benchmarks|scripts|docs)/'; then
  echo "the wheel holds more than the package" >&2
  exit 1
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"$featviz" run resnet18 --weights none "$photo" --layers 'layer1.*' --size 64 --out maps
"$featviz" report maps
"$featviz" audit resnet18 --weights none "$photo" --size 64 --out audit
test -s maps/spheres.jpg/manifest.json && test -s maps/report/index.html && test -s audit/audit.json
echo "the wheel works: $(basename "$wheel")"
