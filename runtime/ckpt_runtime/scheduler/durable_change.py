"""How one change is made durable whose write may fail with an unknown outcome: the attempts, and what follows.

An outcome that is unknown is settled by storing the change again, which reads first. When that does not come to an end
soon the sender is told so, and what is stored is written again as it is until that succeeds: a mere look would not do,
since a write that is on its way could take effect behind it, and nobody would put it in force.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

ANOTHER_LEADS = "another driver leads the job, ask it what is stored"
OUTCOME_UNKNOWN = (
    "it is unknown whether the change is stored; it is looked up as soon as storage answers, and applied if "
    "it is; look at the configuration, or repeat the request then"
)
MAX_ATTEMPTS = 5
"""How often a change is stored again before its sender is told that its outcome is unknown."""


class Next(Enum):
    """What follows a write that was not confirmed."""

    GIVE_UP = "nothing has changed"
    STORE_AGAIN = "store it again"
    SETTLE = "write again what is stored"


@dataclass(slots=True)
class DurableChange:
    """``unknown``: one of the writes may have been done."""

    attempt: int = 0
    unknown: bool = False

    @property
    def is_answered(self) -> bool:
        """Whether its sender was told that nobody knows."""
        return self.attempt >= MAX_ATTEMPTS

    @property
    def settle_attempt(self) -> int:
        """Counts from 0, which is when its sender is to be told."""
        return self.attempt - MAX_ATTEMPTS

    def failed(self, *, unknown: bool, final: bool = False) -> Next:
        """A write was not done (``final``: nor was any before), or may have been."""
        if not unknown and (final or not self.unknown):
            return Next.GIVE_UP
        # Once one write may have been done, a later failure proves nothing about it.
        self.unknown |= unknown
        self.attempt += 1
        return Next.SETTLE if self.is_answered else Next.STORE_AGAIN
