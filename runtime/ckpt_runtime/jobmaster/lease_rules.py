"""When a leader may go on and when a challenger may begin. Pure: each is told the time by its own monotonic clock.

A leader counts itself out before a challenger may count it out: its claim is good for two thirds of the lease time from
the beginning of its last renewal, a challenger waits for the whole of it after the last one that it saw. That holds as
long as neither clock is half as fast again as the other; for a clock that stood still there is the fence in storage.
"""

from __future__ import annotations


class OwnLease:
    """A leader's own view of its lease. Times are in the unit of ``lease_time``."""

    def __init__(self, lease_time: float) -> None:
        self._good_for = lease_time * 2 / 3
        self.valid_until = 0.0

    def renewed(self, begun: float) -> None:
        """Storage has taken a sign of life that was begun then, whenever it answered."""
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
        """Of the leader seen last; None before the first look."""
        return None if self._seen is None else self._seen[0]

    def saw(self, epoch: int, sequence: int, *, released: bool, begun: float) -> None:
        """A look that was begun then has found this sign of life; ``epoch`` 0 stands for no leader ever."""
        if self._seen != (epoch, sequence):
            self._seen, self._since = (epoch, sequence), begun
        self._vacant = epoch == 0 or released

    def may_claim(self, now: float) -> bool:
        return self._vacant or (self._seen is not None and now - self._since >= self._lease_time)
