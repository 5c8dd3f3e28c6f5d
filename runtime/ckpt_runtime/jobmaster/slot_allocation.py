"""Which jobs get slots now, which have to wait and why, and which cores workers are bound to. Pure.

A request is served as a whole or not at all, and holds nothing while the cluster cannot serve it, so that the slots
which are there serve others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Supply:
    """What the cluster can give beside the slots that jobs hold.

    ``ready`` slots have a worker. ``starting`` ones were launched and have none yet. ``launchable`` is how many more
    the cluster has room for, None without a limit.
    """

    ready: int
    starting: int
    launchable: int | None


@dataclass(frozen=True, slots=True)
class Allocation:
    """Positions of requests. Those in neither tuple wait for slots that are ``starting`` or in ``launch``."""

    granted: tuple[int, ...]
    refused: tuple[int, ...]
    launch: int


def allocate(missing: Sequence[int], supply: Supply) -> Allocation:
    """``missing`` says how many slots each request lacks, the one to be served first in front.

    A request that the cluster can serve has its share reserved while its slots start. One that it cannot serve is
    refused for now, and those behind it are served.
    """
    ready, starting, launchable = supply.ready, supply.starting, supply.launchable
    granted: list[int] = []
    refused: list[int] = []
    launch = 0
    for position, count in enumerate(missing):
        if launchable is not None and count > ready + starting + launchable:
            refused.append(position)
            continue
        from_ready = min(count, ready)
        from_starting = min(count - from_ready, starting)
        launched = count - from_ready - from_starting
        ready -= from_ready
        starting -= from_starting
        launch += launched
        if launchable is not None:
            launchable -= launched
        if from_ready == count:
            granted.append(position)
    return Allocation(tuple(granted), tuple(refused), launch)


def shortage(needed: int, total: int, free: int) -> str:
    """Why a request for ``needed`` slots is refused; ``free`` are those of ``total`` that no other job holds."""
    slots = "1 slot" if needed == 1 else f"{needed} slots"
    if needed > total:
        return f"needs {slots}, the cluster has {total}"
    return f"needs {slots}, {free} of the cluster's {total} are free"


def choose_cores(
    workers: Sequence[tuple[str, Sequence[int]]], others: Sequence[tuple[str, int | None]]
) -> list[int | None]:
    """A core for each worker of a job, None for one that is not to be bound.

    ``workers`` are given as host and cores of that host, the workers of ``others`` as host and the core that they are
    bound to. No two workers are bound to one core. Where a host has more workers than cores none is bound: it could
    wait for its core while another core is idle.
    """
    on_host = Counter(host for host, _ in (*workers, *others))
    taken = {(host, core) for host, core in others if core is not None}
    chosen: list[int | None] = []
    for host, cores in workers:
        free = (core for core in cores if (host, core) not in taken)
        core = next(free, None) if on_host[host] <= len(cores) else None
        if core is not None:
            taken.add((host, core))
        chosen.append(core)
    return chosen
