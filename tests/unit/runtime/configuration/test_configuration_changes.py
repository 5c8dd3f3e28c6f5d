"""What differs between two configurations, and what of it may be changed while a job runs."""

from __future__ import annotations

import pytest

from ckpt_runtime.configuration import (
    AllowList,
    Changeability,
    CheckpointingOptions,
    Configuration,
    ConfigurationChange,
    find_changes,
)

INTERVAL = "execution.checkpointing.interval"
MAX_PARALLELISM = "pipeline.max-parallelism"


def changed_keys(old: dict[str, str], new: dict[str, str]) -> list[str]:
    return [change.key for change in find_changes(Configuration(old), Configuration(new))]


@pytest.mark.row("530.4")
@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        (INTERVAL, "10s", "10 s"),
        (INTERVAL, "10 s", "10000ms"),
        ("state.storage.fs.memory-threshold", "64kb", "65536"),
        ("execution.checkpointing.unaligned.enabled", "TRUE", "true"),
        ("execution.checkpointing.mode", "exactly_once", "EXACTLY_ONCE"),
        ("restart-strategy.exponential-delay.backoff-multiplier", "2", "2.0"),
    ],
)
def test_values_that_mean_the_same_are_no_change(key: str, old: str, new: str) -> None:
    assert changed_keys({key: old}, {key: new}) == []


@pytest.mark.row("530.4")
def test_an_older_spelling_of_the_key_is_no_change() -> None:
    assert changed_keys({"state.backend": "rocksdb"}, {"state.backend.type": "ROCKSDB"}) == []


@pytest.mark.row("530.4")
def test_the_default_equals_absence_only_where_the_option_says_so() -> None:
    assert changed_keys({"execution.checkpointing.timeout": "10 min"}, {}) == ["execution.checkpointing.timeout"]
    assert changed_keys({MAX_PARALLELISM: "-1"}, {}) == []
    assert changed_keys({}, {MAX_PARALLELISM: "64"}) == [MAX_PARALLELISM]


@pytest.mark.row("530.4")
def test_changes_name_both_values_in_the_order_of_the_keys() -> None:
    old = Configuration({INTERVAL: "1 s", "acme.a": "1", "acme.b": "x"})
    new = Configuration({INTERVAL: "2 s", "acme.b": "y", "acme.c": "3"})
    assert find_changes(old, new) == (
        ConfigurationChange("acme.a", "1", None),
        ConfigurationChange("acme.b", "x", "y"),
        ConfigurationChange("acme.c", None, "3"),
        ConfigurationChange(INTERVAL, "1 s", "2 s"),
    )


def test_unusable_values_are_compared_as_texts() -> None:
    assert changed_keys({INTERVAL: "x"}, {INTERVAL: "x"}) == []
    assert changed_keys({INTERVAL: "x"}, {INTERVAL: "y"}) == [INTERVAL]


@pytest.mark.row("530.3")
def test_the_allow_list_holds_the_interval_by_default_anything_or_nothing() -> None:
    key = "jobmanager.execution.dynamic-configuration.allow-list"
    changes = find_changes(Configuration({}), Configuration({INTERVAL: "1 s", "acme.a": "1", "pipeline.name": "n"}))
    assert AllowList.of(Configuration({})).refused(changes) == ("acme.a", "pipeline.name")
    assert AllowList.of(Configuration({key: ""})).refused(changes) == ("acme.a", INTERVAL, "pipeline.name")
    assert AllowList.of(Configuration({key: "*"})).refused(changes) == ("pipeline.name",)
    assert AllowList.of(Configuration({key: "acme.a, state.backend"})).allows("state.backend.type")


@pytest.mark.row("530.3")
def test_what_is_fixed_for_a_jobs_life_is_refused_although_it_is_listed() -> None:
    changes = find_changes(Configuration({}), Configuration({MAX_PARALLELISM: "64"}))
    assert AllowList(frozenset({MAX_PARALLELISM})).refused(changes) == (MAX_PARALLELISM,)


@pytest.mark.row("530.8")
def test_what_can_be_changed_live_needs_no_restart() -> None:
    live = {
        CheckpointingOptions.INTERVAL,
        CheckpointingOptions.TIMEOUT,
        CheckpointingOptions.MIN_PAUSE,
        CheckpointingOptions.MAX_CONCURRENT_CHECKPOINTS,
        CheckpointingOptions.TOLERABLE_FAILED_CHECKPOINTS,
        CheckpointingOptions.ALIGNED_TIMEOUT,
        CheckpointingOptions.UNALIGNED,
        CheckpointingOptions.MAX_INFLIGHT_DATA,
    }
    for option in live:
        assert ConfigurationChange(option.key, None, "1").changeability is Changeability.LIVE
    assert ConfigurationChange("parallelism.default", "1", "2").changeability is Changeability.RESTART
    assert ConfigurationChange("acme.a", "1", "2").changeability is Changeability.RESTART
