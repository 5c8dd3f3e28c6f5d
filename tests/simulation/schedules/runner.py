"""Runs many schedules in several processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tests.simulation.schedules.simulation import S, Simulation

_BLOCK = 100


def run_seeds(
    simulation: Simulation[S], first: int, count: int, processes: int | None = None
) -> Iterator[tuple[int, list[int]]]:
    """Runs ``count`` schedules from ``first`` on; yields how many have run and which of the latest block failed."""
    blocks = [range(start, min(start + _BLOCK, first + count)) for start in range(first, first + count, _BLOCK)]
    workers = min(len(blocks), processes or os.cpu_count() or 1)
    if workers <= 1:
        for block in blocks:
            yield len(block), simulation.failing_seeds(block)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        submitted = {pool.submit(simulation.failing_seeds, block): block for block in blocks}
        for future in as_completed(submitted):
            yield len(submitted[future]), future.result()


def read_seeds(path: Path) -> list[int]:
    """Seeds that were kept: one a line, and after ``#`` what it found."""
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [int(line) for line in lines if line]
