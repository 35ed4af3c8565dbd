"""What does a first run cost, with an empty numba cache, beyond the second?

    python benchmarks/cold_start.py [--rounds 3]

Processor time (user and system, all threads) of commands over the digits of the
demonstration; the least of the rounds, since other work on the machine only adds."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
DIGITS = HERE / "sample_images" / "digits"
IMAGES = {"run": DIGITS / "00-5.png", "look": DIGITS / "00-5.png", "audit": DIGITS}
IMAGES["exemplars"] = DIGITS


def cost(command: str, cache: Path, out: Path) -> float:
    """Seconds of one process."""
    words = [
        command,
        HERE / "configs" / "digits_cnn.pth",
        IMAGES[command],
        "--out",
        out,
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "featviz", *map(str, words), "-q"],
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(HERE)},
        stdout=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command} failed")
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print("command      first   second   difference")
    for command in IMAGES:
        costs = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                outs = (folder / f"{turn}.png" for turn in range(2))
                costs.append([cost(command, folder / "cache", out) for out in outs])
        first, second = (min(seconds) for seconds in zip(*costs, strict=True))
        print(
            f"{command:10s}{first:8.2f}{second:9.2f}{first - second:13.2f}", flush=True
        )


if __name__ == "__main__":
    main()
