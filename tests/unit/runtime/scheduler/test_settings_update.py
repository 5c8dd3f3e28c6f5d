"""FLIP-571's change of settings: stored, in force, answered; one after the other; unknown outcomes settled."""

from __future__ import annotations

import pytest

from ckpt_runtime.checkpoint.configuration import (
    CheckpointConfiguration,
    CheckpointConfigurationError,
    CheckpointOverrides,
    OverridesChange,
)
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler.core_events import ChangeAnswered, ChangeOutcome
from ckpt_runtime.scheduler.durable_change import MAX_ATTEMPTS, OUTCOME_UNKNOWN, SettingsUpdate

SETTINGS = CheckpointConfiguration()
CHANGE = CheckpointOverrides(timeout_ms=77)
STORED = '{"checkpointTimeout": 77}'


@pytest.fixture
def update() -> SettingsUpdate:
    update = SettingsUpdate(CheckpointOverrides())
    assert update.requested(core.PatchRequested("a", CHANGE), SETTINGS) == [
        core.StoreOverrides("a", OverridesChange(CHANGE, SETTINGS), 0)
    ]
    return update


def test_update_is_stored_and_applied_while_a_second_one_is_refused(update: SettingsUpdate) -> None:
    assert update.requested(core.PatchRequested("b", None), SETTINGS) == [ChangeAnswered("b", ChangeOutcome.BUSY)]
    assert update.is_busy
    assert update.concerns("a")
    assert update.stored(core.OverridesStored("a", STORED)) == [ChangeAnswered("a", ChangeOutcome.APPLIED)]
    assert update.overrides == CHANGE
    assert not update.concerns("a")
    assert not update.is_busy


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (core.OverridesRefused("a", "no"), ChangeOutcome.REFUSED),
        (core.ChangeNotStored("a", "no"), ChangeOutcome.NOT_STORED),
        (core.ChangeNotStored("a", "no", final=True), ChangeOutcome.NOT_STORED),
    ],
)
def test_refused_or_failed_patch_changes_nothing(
    update: SettingsUpdate, answer: core.OverridesRefused | core.ChangeNotStored, outcome: ChangeOutcome
) -> None:
    assert update.answered(answer) == [ChangeAnswered("a", outcome, "no")]
    assert update.overrides == CheckpointOverrides()
    assert update.answered(answer) == []


def test_an_unknown_outcome_is_stored_again_and_a_failure_then_says_nothing(update: SettingsUpdate) -> None:
    (again,) = update.answered(core.ChangeUnknown("a", "?"))
    assert again == core.StoreOverrides("a", OverridesChange(CHANGE, SETTINGS), 1)
    (again,) = update.answered(core.ChangeNotStored("a", "away"))
    assert isinstance(again, core.StoreOverrides)
    assert update.stored(core.OverridesStored("a", STORED)) == [ChangeAnswered("a", ChangeOutcome.APPLIED)]


def stay_unknown(update: SettingsUpdate) -> list[core.JobOutput]:
    outputs: list[core.JobOutput] = []
    for _ in range(MAX_ATTEMPTS):
        outputs = update.answered(core.ChangeUnknown("a", "?"))
    return outputs


def test_an_unknown_outcome_is_reported_as_unknown_and_settled_later(update: SettingsUpdate) -> None:
    assert stay_unknown(update) == [
        ChangeAnswered("a", ChangeOutcome.UNKNOWN, OUTCOME_UNKNOWN),
        core.SettleOverrides("a", 0),
    ]
    assert update.answered(core.ChangeNotStored("a", "away")) == [core.SettleOverrides("a", 1)]
    assert update.answered(core.ChangeUnknown("a", "?")) == [core.SettleOverrides("a", 2)]
    assert update.requested(core.PatchRequested("b", None), SETTINGS) == [ChangeAnswered("b", ChangeOutcome.BUSY)]
    assert update.stored(core.OverridesStored("a", STORED)) == []
    assert update.overrides == CHANGE
    assert not update.is_busy


def test_lookup_of_an_unknown_outcome_ends_when_the_job_is_no_longer_stored(update: SettingsUpdate) -> None:
    stay_unknown(update)
    assert update.answered(core.ChangeNotStored("a", "gone", final=True)) == []
    assert not update.is_busy


def test_another_driver_leads(update: SettingsUpdate) -> None:
    (answer,) = update.abandoned()
    assert isinstance(answer, ChangeAnswered)
    assert answer.outcome is ChangeOutcome.UNKNOWN
    assert update.abandoned() == []
    assert not update.concerns("a")


def test_unusable_settings_are_not_stored() -> None:
    change = OverridesChange(CheckpointOverrides(timeout_ms=1), SETTINGS)
    with pytest.raises(CheckpointConfigurationError):
        change(None)
    assert OverridesChange(CHANGE, SETTINGS)('{"checkpointInterval": 50}') == (
        '{"checkpointInterval": 50, "checkpointTimeout": 77}'
    )
    assert OverridesChange(None, SETTINGS)(STORED) is None
