"""Decides which requests for slots are served, what waiting ones reserve, and which cores workers get. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple


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
    """``granted`` and ``refused`` are positions of requests; the others wait for slots that are starting or launched.

    ``launch`` is the number of slots to launch now.
    """

    granted: tuple[int, ...]
    refused: tuple[int, ...]
    launch: int
    reserved_for: int | None = None
    """The first refused request that reserves what is left."""


class Turn(NamedTuple):
    """Whether free slots are reserved for a waiting request now, and in how many seconds that changes, if ever."""

    reserves: bool
    ends_in_s: float | None


def turn_after(waited_s: float, interval_s: float) -> Turn:
    """The turn of a request that has waited for ``waited_s``.

    In the first interval later requests are served before it, in the next one free slots are reserved for it, and so
    on alternately. So it is served once enough slots become free within one interval, however many requests come
    later. And if the other jobs never end, free slots do not stay unused forever. An interval of 0 reserves nothing.
    """
    if interval_s <= 0:
        return Turn(False, None)
    intervals, within_s = divmod(waited_s, interval_s)
    return Turn(intervals % 2 == 1, interval_s - within_s)


def allocate(missing: Sequence[int], supply: Supply, reserving: Collection[int] = ()) -> Allocation:
    """``missing`` has the number of slots that each request lacks, in the order in which they are served.

    A request that the cluster can serve has its share reserved while its slots start. A request that it cannot serve
    is refused for now, and the later ones are served, unless it is one of those that are ``reserving``, by position:
    then all that is left is kept for it.
    """
    ready, starting, launchable = supply.ready, supply.starting, supply.launchable
    granted: list[int] = []
    refused: list[int] = []
    launch = 0
    reserved_for = None
    for position, count in enumerate(missing):
        if launchable is not None and count > ready + starting + launchable:
            refused.append(position)
            if position in reserving and reserved_for is None:
                reserved_for = position
                ready = starting = launchable = 0
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
    return Allocation(tuple(granted), tuple(refused), launch, reserved_for)


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
