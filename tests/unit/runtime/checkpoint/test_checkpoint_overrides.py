"""FLIP-571 overrides: merge, apply, the stored document, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.checkpoint.configuration import (
    CheckpointConfiguration,
    CheckpointConfigurationError,
    CheckpointOverrides,
)

SUBMITTED = CheckpointConfiguration(interval_ms=1_000, min_pause_ms=100)


@pytest.mark.row("571.1")
def test_only_given_fields_change():
    effective = CheckpointOverrides(timeout_ms=5_000).applied_to(SUBMITTED)
    assert (effective.interval_ms, effective.timeout_ms) == (1_000, 5_000)


def test_the_later_one_wins():
    merged = CheckpointOverrides(interval_ms=1, timeout_ms=2).merged_with(
        CheckpointOverrides(interval_ms=3, unaligned_enabled=False)
    )
    assert merged == CheckpointOverrides(interval_ms=3, timeout_ms=2, unaligned_enabled=False)


@pytest.mark.row("571.7")
def test_a_job_stored_without_any():
    assert CheckpointOverrides.from_document(None).applied_to(SUBMITTED) == SUBMITTED


def test_the_interval_is_raised_to_the_pause():
    assert CheckpointOverrides(interval_ms=20).applied_to(SUBMITTED).interval_ms == 100


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (CheckpointOverrides(interval_ms=9), "interval_ms"),
        (CheckpointOverrides(timeout_ms=0), "timeout_ms"),
        (CheckpointOverrides(aligned_timeout_ms=-1), "aligned_timeout_ms is -1; it must be at least 0"),
        (CheckpointOverrides(max_inflight_data_bytes=-1), "max_inflight_data_bytes is -1; it must be at least 0"),
    ],
)
def test_override_that_a_submission_would_refuse_is_refused(overrides, named):
    with pytest.raises(CheckpointConfigurationError, match=named):
        overrides.applied_to(SUBMITTED)


@pytest.mark.row("571.1")
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (CheckpointOverrides(interval_ms=300_000), "300000 ms after .*timeout_ms.* less than the 900000 ms .*Kafka"),
        (CheckpointOverrides(timeout_ms=899_900), "take 899900 ms .* less than the 900000 ms"),
        (CheckpointOverrides(min_pause_ms=400_000), "min_pause_ms 400000.* less than the 900000 ms"),
    ],
)
def test_settings_under_which_brokers_would_abort_transactions_are_refused(overrides, named):
    submitted = CheckpointConfiguration(interval_ms=1_000, timeout_ms=600_000)
    assert overrides.applied_to(submitted).timeout_ms
    with pytest.raises(CheckpointConfigurationError, match=named):
        overrides.applied_to(replace(submitted, transaction_timeout_ms=900_000))
    CheckpointOverrides(interval_ms=299_999).applied_to(replace(submitted, transaction_timeout_ms=900_000))


@pytest.mark.parametrize(
    ("backlog_ms", "named"),
    [
        (300_000, "interval_during_backlog_ms 300000"),
        (0, "no periodic checkpoint would be taken while sources process a backlog"),
    ],
)
def test_interval_during_a_backlog_is_checked_against_transactions_too(backlog_ms, named):
    submitted = CheckpointConfiguration(
        interval_ms=1_000, interval_during_backlog_ms=backlog_ms, transaction_timeout_ms=900_000
    )
    with pytest.raises(CheckpointConfigurationError, match=named):
        submitted.effective()


@pytest.mark.parametrize(
    "document",
    [
        "{",
        "[]",
        '"x"',
        '{"checkpointInterval": "5"}',
        '{"checkpointInterval": true}',
        '{"checkpointInterval": 1.5}',
        '{"unalignedEnabled": 1}',
        '{"interval": 5}',
    ],
)
def test_other_documents_are_refused(document):
    with pytest.raises(CheckpointConfigurationError):
        CheckpointOverrides.from_document(document)


_NUMBER = st.none() | st.integers(0, 2**40)


@given(
    st.builds(
        CheckpointOverrides,
        interval_ms=_NUMBER,
        timeout_ms=_NUMBER,
        max_concurrent=_NUMBER,
        unaligned_enabled=st.none() | st.booleans(),
        max_inflight_data_bytes=_NUMBER,
    )
)
def test_the_stored_form_gives_the_same_back(overrides):
    document = overrides.to_document()
    assert CheckpointOverrides.from_document(document) == overrides
    names = {
        "interval_ms": "checkpointInterval",
        "timeout_ms": "checkpointTimeout",
        "max_concurrent": "maxConcurrentCheckpoints",
        "unaligned_enabled": "unalignedEnabled",
        "max_inflight_data_bytes": "maxInflightDataBytes",
    }
    assert json.loads(document) == {names[field]: value for field, value in overrides.given.items()}
