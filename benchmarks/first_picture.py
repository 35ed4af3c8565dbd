"""What does the first picture cost a command beyond the imports that it cannot do
without?

    python benchmarks/first_picture.py [--rounds 7] [--before CHECKOUT]

Two commands draw one photograph, both with random weights and every output of Conv2d
and ReLU: `featviz run resnet18 IMG` needs torchvision, `featviz run net.py:Net IMG`
(two convolutions) does not. Beside each stands a process that only imports the
libraries; the two are run in turns, after one run of each that compiles and fills
caches. `--before` takes the commands of another checkout into the turns.

Medians over the rounds of CPU seconds (user and system, all threads) and seconds on the
clock, and the median of the differences of a command to the imports of its round. The
CPU seconds are the figure to compare on a machine that others use, too."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent.parent
PHOTO = HERE / "sample_images" / "scenes" / "landscape.jpg"
NETWORK = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1))
"""
COMMANDS = {
    "resnet18": "torch, torchvision, numba, numpy, PIL",
    "net.py:Net": "torch, numba, PIL",
}
"""MODEL, and what the process beside it imports."""


class Cost(NamedTuple):
    """Of one process, in seconds."""

    cpu: float
    clock: float


def cost(words: list[str], folder: Path, checkout: Path) -> Cost:
    """Run a command of a checkout in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what pip installs is compiled
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *words], cwd=folder, env=environment)
    _, status, used = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{' '.join(words)} failed")
    return Cost(used.ru_utime + used.ru_stime, time.perf_counter() - start)


def measure(model: str, rounds: int, folder: Path, checkouts: dict[str, Path]) -> None:
    """Print the lines of one model."""
    drawing = [
        "-m",
        "featviz",
        "run",
        model,
        str(PHOTO),
        "--layers",
        "Conv2d,ReLU",
        "-q",
    ]
    drawing += ["--weights", "none", "--out", "out", "--overwrite"]
    sides = {"imports": (["-c", f"import os, {COMMANDS[model]}; os._exit(0)"], HERE)}
    sides |= {name: (drawing, checkout) for name, checkout in checkouts.items()}
    costs: dict[str, list[Cost]] = {side: [] for side in sides}
    for turn in range(rounds + 1):
        for side, (words, checkout) in sides.items():
            used = cost(words, folder, checkout)
            if turn > 0:
                costs[side].append(used)
    for side, all_used in costs.items():
        print(f"{model:12s}{side:10s}{_words(all_used, costs['imports'])}", flush=True)


def _words(used: list[Cost], imports: list[Cost]) -> str:
    cpu, clock = (statistics.median(values) for values in zip(*used, strict=True))
    more = statistics.median(a.cpu - b.cpu for a, b in zip(used, imports, strict=True))
    longer = statistics.median(
        a.clock - b.clock for a, b in zip(used, imports, strict=True)
    )
    return f"{cpu:8.2f}{clock:8.2f}{more:12.2f}{longer:12.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--before", type=Path)
    args = parser.parse_args()
    checkouts = {"before": args.before.resolve()} if args.before else {}
    print(
        "model       process        CPU   clock  CPU beyond  clock beyond the imports"
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "net.py").write_text(NETWORK)
        for model in COMMANDS:
            measure(model, args.rounds, Path(folder), {**checkouts, "featviz": HERE})


if __name__ == "__main__":
    main()
