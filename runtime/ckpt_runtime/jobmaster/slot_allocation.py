"""Which jobs get slots now, which have to wait and why, and which cores workers are bound to. Pure.

A request is served as a whole or not at all. While the cluster cannot serve it, it holds no slots, so that other
requests can use them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Supply:
    """The slots that the cluster can provide beside those that jobs hold.

    ``ready`` slots have a worker. ``starting`` ones were launched and have no worker yet. ``launchable`` is how many
    more the cluster has room for, None without a limit.
    """

    ready: int
    starting: int
    launchable: int | None


@dataclass(frozen=True, slots=True)
class Allocation:
    """Positions of requests. Requests in neither tuple wait for slots that are ``starting`` or in ``launch``."""

    granted: tuple[int, ...]
    refused: tuple[int, ...]
    launch: int


def allocate(missing: Sequence[int], supply: Supply) -> Allocation:
    """``missing`` has the number of slots that each request lacks, in the order in which they are served.

    A request that the cluster can serve has its share reserved while its slots start. A request that it cannot serve
    is refused for now, and the later ones are served.
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
    """Chooses a core for each worker of a job, None for a worker that is not to be bound.

    ``workers`` are given as host and cores of that host, the workers of ``others`` as host and the core that they are
    bound to. No two workers are bound to one core. If a host has more workers than cores, no worker of the job is bound
    there: it could wait for its core while another core is idle.
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
