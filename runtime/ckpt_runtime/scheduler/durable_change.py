"""Makes one change durable although a write may have an unknown outcome: the attempts, and what follows.

An unknown outcome is settled by storing the change again, which reads first. If this does not succeed soon, the sender
is notified, and the stored state is rewritten unchanged until that succeeds. A mere read would not suffice: a write
still on its way could take effect after it, and this driver would not put it in force.
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
"""Number of attempts to store a change before its sender is told that the outcome is unknown."""


class Next(Enum):
    """The next step after a write that was not confirmed."""

    GIVE_UP = "nothing has changed"
    STORE_AGAIN = "store it again"
    SETTLE = "write again what is stored"


@dataclass(slots=True)
class DurableChange:
    """The writes of one change. ``unknown``: one of them may have been done."""

    attempt: int = 0
    unknown: bool = False

    @property
    def is_answered(self) -> bool:
        """Whether the sender was told that the outcome is unknown."""
        return self.attempt >= MAX_ATTEMPTS

    @property
    def settle_attempt(self) -> int:
        """The number of the settle attempt, from 0; at 0 the sender is notified."""
        return self.attempt - MAX_ATTEMPTS

    def failed(self, *, unknown: bool, final: bool = False) -> Next:
        """A write was not done (``final``: nor was any earlier one), or its outcome is unknown."""
        if not unknown and (final or not self.unknown):
            return Next.GIVE_UP
        # Once a write may have been done, a later failure says nothing about it.
        self.unknown |= unknown
        self.attempt += 1
        return Next.SETTLE if self.is_answered else Next.STORE_AGAIN
