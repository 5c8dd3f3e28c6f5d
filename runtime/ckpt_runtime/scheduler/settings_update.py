"""One change of a running job's checkpoint settings after the other: stored, then in force, then answered (FLIP-571).

An outcome that is unknown is settled by storing the change again, which reads first. When that does not come to an end
soon the sender is told so, and what is stored is written again as it is until that succeeds: a mere look would not do,
since a write that is on its way could take effect behind it, and nobody would put it in force. No other change begins
before.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.overrides import CheckpointOverrides
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler.core_events import JobOutput, PatchOutcome
from ckpt_runtime.scheduler.replacement import ReplacementRefusedError

ANOTHER_LEADS = "another driver leads the job, ask it what is stored"
OUTCOME_UNKNOWN = (
    "it is unknown whether the change is stored; it is looked up as soon as storage answers, and applied if "
    "it is; look at the configuration, or repeat the request then"
)
MAX_ATTEMPTS = 5
"""How often an update is stored again before its sender is told that its outcome is unknown."""


@dataclass(slots=True)
class _Patch:
    """The change in progress. ``unknown``: one of its writes may have been done."""

    request_id: str
    change: core.OverridesChange
    attempt: int = 0
    unknown: bool = False

    @property
    def is_answered(self) -> bool:
        return self.attempt >= MAX_ATTEMPTS


class SettingsUpdate:
    """``overrides`` are those in force. Answers of changes that are settled are ignored."""

    def __init__(self, overrides: CheckpointOverrides) -> None:
        self.overrides = overrides
        self._patch: _Patch | None = None

    def check_idle(self) -> None:
        """Raises :class:`ReplacementRefusedError` while a change is in progress."""
        if self._patch is not None:
            raise ReplacementRefusedError("the job's checkpoint settings are being changed; try again")

    def concerns(self, request_id: str) -> bool:
        """Whether that is the change in progress."""
        return self._patch is not None and self._patch.request_id == request_id

    def requested(self, event: core.PatchRequested, settings: CheckpointConfiguration) -> list[JobOutput]:
        """``settings`` are the job's without overrides."""
        if self._patch is not None:
            return [core.PatchAnswered(event.request_id, PatchOutcome.BUSY)]
        self._patch = _Patch(event.request_id, core.OverridesChange(event.overrides, settings))
        return [core.StoreOverrides(event.request_id, self._patch.change, 0)]

    def stored(self, event: core.OverridesStored) -> list[JobOutput]:
        """The change in progress is settled: :attr:`overrides` are what is stored."""
        self.overrides = CheckpointOverrides.from_document(event.text)
        return self._settle(PatchOutcome.APPLIED, "")

    def answered(
        self, event: core.OverridesRefused | core.OverridesNotStored | core.OverridesUnknown
    ) -> list[JobOutput]:
        """Storing or looking up has failed, or nobody knows."""
        patch = self._patch
        if patch is None or patch.request_id != event.request_id:
            return []
        match event:
            case core.OverridesRefused(_, message):
                return self._settle(PatchOutcome.REFUSED, message)
            case core.OverridesNotStored(_, message, gone) if gone or not patch.unknown:
                return self._settle(PatchOutcome.NOT_STORED, message)
            case core.OverridesUnknown():
                patch.unknown = True
        patch.attempt += 1
        if patch.attempt < MAX_ATTEMPTS:
            return [core.StoreOverrides(patch.request_id, patch.change, patch.attempt)]
        settle: list[JobOutput] = [core.SettleOverrides(patch.request_id, patch.attempt - MAX_ATTEMPTS)]
        if patch.attempt == MAX_ATTEMPTS:
            settle.insert(0, core.PatchAnswered(patch.request_id, PatchOutcome.UNKNOWN, OUTCOME_UNKNOWN))
        return settle

    def abandoned(self) -> list[JobOutput]:
        """Another driver leads and reads what is stored. No answer that is still to come changes anything here."""
        return self._settle(PatchOutcome.UNKNOWN, ANOTHER_LEADS)

    def _settle(self, outcome: PatchOutcome, message: str) -> list[JobOutput]:
        patch, self._patch = self._patch, None
        if patch is None or patch.is_answered:
            return []
        return [core.PatchAnswered(patch.request_id, outcome, message)]
