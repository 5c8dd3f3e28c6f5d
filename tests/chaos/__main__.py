"""``make chaos``: random faults for a time. Prints the seed first; the same seed gives the same faults."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.run import FAULTS, Run

_RATE = 1500
_ROUND_S = 300
"""Each round has a session, a job and an input of its own, and ends with the oracle."""


def main() -> int:
    """Returns 1 at the first round that fails; its directory stays."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", action="append", choices=sorted(FAULTS), help="these faults alone; repeatable")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    end = time.monotonic() + options.minutes * 60
    number = 0
    while time.monotonic() < end:
        lasts_s = min(_ROUND_S, end - time.monotonic())
        print(f"round {number}: seed {seed + number}, {lasts_s:.0f} s of faults", flush=True)
        if not _round(seed + number, lasts_s, options.only or sorted(FAULTS)):
            return 1
        number += 1
    return 0


def _round(seed: int, lasts_s: float, names: list[str]) -> bool:
    directory = Path(tempfile.mkdtemp(prefix=f"ckpt-chaos-{seed}-"))
    run = Run(directory, seed, int(_RATE * (lasts_s + 240)), _RATE, log=lambda text: print(text, flush=True))
    end = time.monotonic() + lasts_s
    try:
        run.begin()
        while time.monotonic() < end:
            run.fault(run.choice.choice(names))
        run.finish()
    except Exception as error:
        print(f"seed {seed} failed at fault {run.faults}: {type(error).__name__}: {error}; see {directory}", flush=True)
        run.session.kill_everything()
        return False
    run.clean_up()
    return True


if __name__ == "__main__":
    sys.exit(main())
