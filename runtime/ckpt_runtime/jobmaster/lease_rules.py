"""How long a leader's lease holds, and when a challenger may claim it. Pure: each passes its own monotonic time.

A leader's lease expires for itself before a challenger may take it: it holds for two thirds of the lease time from the
beginning of its last renewal, and a challenger waits for the whole lease time after the last renewal that it saw. This
works while neither clock runs 1.5 times as fast as the other; for a suspended clock there is the fence in storage.
"""

from __future__ import annotations


class OwnLease:
    """A leader's own view of its lease. Times are in the unit of ``lease_time``."""

    def __init__(self, lease_time: float) -> None:
        self._good_for = lease_time * 2 / 3
        self.valid_until = 0.0

    def renewed(self, begun: float) -> None:
        """Storage accepted a renewal that began at ``begun``; the time of its answer does not matter."""
        self.valid_until = begun + self._good_for

    def holds(self, now: float) -> bool:
        return now < self.valid_until


class Watch:
    """A challenger's view of the present leader."""

    def __init__(self, lease_time: float) -> None:
        self._lease_time = lease_time
        self._seen: tuple[int, int] | None = None
        self._since = 0.0
        self._vacant = False

    @property
    def epoch(self) -> int | None:
        """The epoch of the leader seen last; None before the first look."""
        return None if self._seen is None else self._seen[0]

    def saw(self, epoch: int, sequence: int, *, released: bool, begun: float) -> None:
        """Records the renewal found by a look that began at ``begun``; ``epoch`` 0 means there was no leader yet."""
        if self._seen != (epoch, sequence):
            self._seen, self._since = (epoch, sequence), begun
        self._vacant = epoch == 0 or released

    def may_claim(self, now: float) -> bool:
        return self._vacant or (self._seen is not None and now - self._since >= self._lease_time)
