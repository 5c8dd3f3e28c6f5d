"""Changes a job's checkpoint settings, one change at a time: stored, then in force, then answered (FLIP-571).

No other change begins before the outcome of the one in progress is known (``durable_change``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.overrides import CheckpointOverrides
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler.core_events import ChangeOutcome, JobOutput
from ckpt_runtime.scheduler.durable_change import ANOTHER_LEADS, OUTCOME_UNKNOWN, DurableChange, Next


@dataclass(slots=True)
class _Patch:
    """The change in progress."""

    request_id: str
    change: core.OverridesChange
    writes: DurableChange = field(default_factory=DurableChange)


class SettingsUpdate:
    """Changes ``overrides``, which are in force. Answers to settled changes are ignored."""

    def __init__(self, overrides: CheckpointOverrides) -> None:
        self.overrides = overrides
        self._patch: _Patch | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a change is in progress."""
        return self._patch is not None

    def concerns(self, request_id: str) -> bool:
        """Whether ``request_id`` is the change in progress."""
        return self._patch is not None and self._patch.request_id == request_id

    def requested(self, event: core.PatchRequested, settings: CheckpointConfiguration) -> list[JobOutput]:
        """Begins a change; ``settings`` are the job's checkpoint settings without overrides."""
        if self._patch is not None:
            return [core.ChangeAnswered(event.request_id, ChangeOutcome.BUSY)]
        self._patch = _Patch(event.request_id, core.OverridesChange(event.overrides, settings))
        return [core.StoreOverrides(event.request_id, self._patch.change, 0)]

    def stored(self, event: core.OverridesStored) -> list[JobOutput]:
        """The change in progress is settled: :attr:`overrides` now are the stored ones."""
        # The stored value, not the requested one: an earlier write may have taken effect as well.
        self.overrides = CheckpointOverrides.from_document(event.text)
        return self._settle(ChangeOutcome.APPLIED, "")

    def answered(self, event: core.OverridesRefused | core.ChangeNotStored | core.ChangeUnknown) -> list[JobOutput]:
        """Storing or settling failed, or its outcome is unknown."""
        patch = self._patch
        if patch is None or patch.request_id != event.request_id:
            return []
        if isinstance(event, core.OverridesRefused):
            return self._settle(ChangeOutcome.REFUSED, event.message)
        unknown = isinstance(event, core.ChangeUnknown)
        match patch.writes.failed(unknown=unknown, final=isinstance(event, core.ChangeNotStored) and event.final):
            case Next.GIVE_UP:
                return self._settle(ChangeOutcome.NOT_STORED, event.message)
            case Next.STORE_AGAIN:
                return [core.StoreOverrides(patch.request_id, patch.change, patch.writes.attempt)]
        settle: list[JobOutput] = [core.SettleOverrides(patch.request_id, patch.writes.settle_attempt)]
        if patch.writes.settle_attempt == 0:
            settle.insert(0, core.ChangeAnswered(patch.request_id, ChangeOutcome.UNKNOWN, OUTCOME_UNKNOWN))
        return settle

    def abandoned(self) -> list[JobOutput]:
        """Another driver leads and reads the stored state. Later answers change nothing here."""
        return self._settle(ChangeOutcome.UNKNOWN, ANOTHER_LEADS)

    def _settle(self, outcome: ChangeOutcome, message: str) -> list[JobOutput]:
        patch, self._patch = self._patch, None
        if patch is None or patch.writes.is_answered:
            return []
        return [core.ChangeAnswered(patch.request_id, outcome, message)]
