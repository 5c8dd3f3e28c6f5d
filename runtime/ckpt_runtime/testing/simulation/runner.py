"""Runs many schedules in several processes, and shrinks what fails."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from ckpt_runtime.testing.simulation.shrink import Failure, find_failure, shrink

_BLOCK = 100


def failing_seeds(seeds: Sequence[int], limit: int | None = None) -> list[int]:
    """The seeds that fail, in order; stops after ``limit`` of them."""
    found = []
    for seed in seeds:
        if find_failure(seed, tracing=False) is not None:
            found.append(seed)
            if limit is not None and len(found) >= limit:
                break
    return found


def run_seeds(
    first: int,
    count: int,
    processes: int | None = None,
    failing: Callable[[Sequence[int]], list[int]] = failing_seeds,
) -> Iterator[tuple[int, list[int]]]:
    """Runs ``count`` schedules from ``first`` on; yields how many have run and which of the latest block failed.

    ``failing`` runs a block; it is a function of a module, since it is sent to other processes.
    """
    blocks = [range(start, min(start + _BLOCK, first + count)) for start in range(first, first + count, _BLOCK)]
    workers = min(len(blocks), processes or os.cpu_count() or 1)
    if workers <= 1:
        for block in blocks:
            yield len(block), failing(block)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        submitted = {pool.submit(failing, block): block for block in blocks}
        for future in as_completed(submitted):
            yield len(submitted[future]), future.result()


def explain(seed: int) -> Failure:
    """The shrunk failure of a seed. Raises ValueError when it does not fail."""
    failure = find_failure(seed)
    if failure is None:
        raise ValueError(f"seed {seed} does not fail")
    return shrink(failure)


def read_seeds(path: Path) -> list[int]:
    """Seeds that were kept: one a line, and after ``#`` what it found."""
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [int(line) for line in lines if line]
