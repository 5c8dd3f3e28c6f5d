"""``make chaos``: random faults for a time. Prints the seed first; the same seed gives the same faults."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos.ends import KINDS
from tests.chaos.run import BACKENDS, FAULTS, SPARK_FAULTS, Run

_RATE = 1500
ANY = "every operator"
_ENDS_RATE = 300
"""Between two systems: a broker without batches takes no more."""
_FAULT_S = 15
"""What a fault takes at most, about."""
_ROUND_S = 300
"""Each round has a session, a job and an input of its own, and ends with the oracle."""


def main() -> int:
    """Returns 1 at the first round that fails; its directory stays, also what is mounted there."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--faults", type=int, help="so many in one round, however long they take")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--spark", action="store_true", help="a session on a Spark cluster of this machine")
    parser.add_argument("--only", action="append", choices=sorted(SPARK_FAULTS), help="these faults alone; repeatable")
    parser.add_argument("--backend", choices=sorted(BACKENDS), help="this state backend alone; else each in its turn")
    parser.add_argument("--kind", choices=sorted(KINDS), help="a job between two systems; else one of every operator")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    names = options.only or sorted(SPARK_FAULTS if options.spark else FAULTS)
    if options.faults is not None:
        backend = options.backend or sorted(BACKENDS)[seed % len(BACKENDS)]
        print(f"seed {seed}, {options.kind or ANY}, {backend}, {options.faults} faults", flush=True)
        rate = _ENDS_RATE if options.kind else _RATE
        rows = int(rate * _FAULT_S * options.faults)
        run = Run(_directory(seed), seed, rows, rate, log=_log, spark=options.spark, backend=backend, kind=options.kind)
        return 0 if _round(run, names, lambda: run.faults < options.faults) else 1
    end = time.monotonic() + options.minutes * 60
    number = 0
    while time.monotonic() < end:
        lasts_s = min(_ROUND_S, end - time.monotonic())
        backend = options.backend or sorted(BACKENDS)[(seed + number) % len(BACKENDS)]
        kind = options.kind or [None, *KINDS][number % (1 + len(KINDS))]
        print(f"round {number}: seed {seed + number}, {kind or ANY}, {backend}, {lasts_s:.0f} s of faults", flush=True)
        rate = _ENDS_RATE if kind else _RATE
        rows = int(rate * (lasts_s + 240))
        run = Run(
            _directory(seed + number),
            seed + number,
            rows,
            rate,
            log=_log,
            spark=options.spark,
            backend=backend,
            kind=kind,
        )
        over = time.monotonic() + lasts_s
        if not _round(run, names, lambda over=over: time.monotonic() < over):  # type: ignore[misc]
            return 1
        number += 1
    return 0


def _log(text: str) -> None:
    print(text, flush=True)


def _directory(seed: int) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"ckpt-chaos-{seed}-"))


def _round(run: Run, names: list[str], goes_on: Callable[[], bool]) -> bool:
    try:
        run.begin()
        begun, kinds = time.monotonic(), run.kinds(names)
        while goes_on():
            run.fault(next(kinds))
        took_s = time.monotonic() - begun
        run.finish()
    except Exception as error:
        _log(f"seed {run.seed} failed at fault {run.faults}: {type(error).__name__}: {error}; see {run.directory}")
        run.session.kill_everything()
        return False
    except BaseException:
        run.clean_up()
        raise
    run.clean_up()
    known = min(run.faults, len(names))
    _log(
        f"seed {run.seed}, {run.backend}: {run.faults} faults of {known} kinds in {took_s:.0f} s; the output of "
        f"{len(run.ends.fed) if run.ends else run.rows} orders is exact, and nothing is left over"
    )
    return True


if __name__ == "__main__":
    sys.exit(main())
