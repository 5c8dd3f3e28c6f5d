"""Values of options: what each type reads, how it prints, and what its errors say."""

from __future__ import annotations

import pytest

from ckpt_runtime.configuration.checkpointing_options import CheckpointingMode, CheckpointingOptions
from ckpt_runtime.configuration.cluster_options import RestOptions
from ckpt_runtime.configuration.option import (
    InvalidOptionError,
    format_duration,
    format_memory_size,
    parse_duration,
    parse_memory_size,
)
from ckpt_runtime.configuration.pipeline_options import PipelineOptions, RestartStrategyOptions, RestartStrategyType
from ckpt_runtime.configuration.state_options import StateBackendType, StateOptions


@pytest.mark.parametrize(
    ("text", "millis"),
    [
        ("10 s", 10_000),
        ("10s", 10_000),
        ("10000ms", 10_000),
        ("10000", 10_000),
        (" 1 MIN ", 60_000),
        ("1m", 60_000),
        ("2 hours", 7_200_000),
        ("1 day", 86_400_000),
        ("1500000 us", 1_500),
        ("0", 0),
        ("PT10S", 10_000),
        (" p1dt2h3m4.5s ", 93_784_500),
        ("P2D", 172_800_000),
        ("PT0,25S", 250),
        ("PT1.S", 1_000),
        ("PT90M", 5_400_000),
    ],
)
def test_durations_are_whole_milliseconds(text: str, millis: int) -> None:
    assert parse_duration(text) == millis


@pytest.mark.parametrize(
    "text",
    [
        *("", "s", "-1 s", "1.5 s", "1e3", "10 x", "1 s 2 ms", "١ s", "1 ns", "9" * 30, "1\ns", "+1s"),
        *("P", "PT", "P1DT", "PT1", "P1Y", "P1W", "PT-1S", "-PT1S", "PT1S1M", "PT1.5M", "PT.5S", "PT0.0001S"),
        *("P" + "9" * 18 + "D", "PT" + "9" * 30 + "S", "PT1 S", "PT١S"),
    ],
)
def test_other_texts_are_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="a number with a unit"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "size"), [("64 kb", 65_536), ("1g", 1 << 30), ("20", 20), ("3 MB", 3 << 20)])
def test_memory_sizes_are_bytes_in_powers_of_1024(text: str, size: int) -> None:
    assert parse_memory_size(text) == size


@pytest.mark.parametrize("text", ["", "1 kib", "-1", "1.5g", "99999999999 tb", "0x10"])
def test_other_texts_are_no_memory_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="a number with a unit"):
        parse_memory_size(text)


def test_canonical_texts_use_the_largest_unit_that_fits() -> None:
    assert [format_duration(value) for value in (0, 999, 10_000, 60_000, 90_000)] == [
        "0 ms",
        "999 ms",
        "10 s",
        "1 min",
        "90 s",
    ]
    assert [format_memory_size(value) for value in (0, 1_000, 65_536)] == ["0 bytes", "1000 bytes", "64 kb"]


@pytest.mark.row("530.2")
def test_an_unusable_value_names_the_option_the_value_and_what_is_allowed() -> None:
    with pytest.raises(InvalidOptionError) as caught:
        CheckpointingOptions.TIMEOUT.parse("soon")
    assert caught.value.key == "execution.checkpointing.timeout"
    assert caught.value.value == "soon"
    assert "at least 10 ms" in caught.value.allowed
    assert str(caught.value).startswith("execution.checkpointing.timeout: 'soon'")


def test_a_value_below_the_least_checkpoint_time_is_refused() -> None:
    for option in (CheckpointingOptions.INTERVAL, CheckpointingOptions.TIMEOUT):
        assert option.parse("10 ms") == 10
        with pytest.raises(InvalidOptionError, match="at least 10 ms"):
            option.parse("9 ms")


def test_enums_are_read_in_any_spelling_and_list_their_values_otherwise() -> None:
    assert CheckpointingOptions.MODE.parse("exactly-once") is CheckpointingMode.EXACTLY_ONCE
    assert RestartStrategyOptions.TYPE.parse("fixeddelay") is RestartStrategyType.FIXED_DELAY
    assert RestartStrategyOptions.TYPE.parse("off") is RestartStrategyType.NONE
    assert StateOptions.BACKEND_TYPE.parse("RocksDB") is StateBackendType.ROCKSDB
    with pytest.raises(InvalidOptionError, match="allowed: hashmap, rocksdb"):
        StateOptions.BACKEND_TYPE.parse("heap")


@pytest.mark.parametrize("text", ["yes", "1", "", "truee"])
def test_booleans_are_true_or_false(text: str) -> None:
    assert CheckpointingOptions.UNALIGNED.parse(" TRUE ") is True
    assert CheckpointingOptions.UNALIGNED.parse("false") is False
    with pytest.raises(InvalidOptionError, match="true, false"):
        CheckpointingOptions.UNALIGNED.parse(text)


@pytest.mark.parametrize("text", ["0", "1.0", "1e3", "", "2147483648", "٣", "--1", "1_000", "9" * 5_000])
def test_integers_are_plain_and_in_range(text: str) -> None:
    assert CheckpointingOptions.MAX_CONCURRENT_CHECKPOINTS.parse(" 3 ") == 3
    with pytest.raises(InvalidOptionError, match="a whole number from 1 to 2147483647"):
        CheckpointingOptions.MAX_CONCURRENT_CHECKPOINTS.parse(text)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e400", "0.5", "x"])
def test_numbers_are_finite_and_in_range(text: str) -> None:
    assert RestartStrategyOptions.EXPONENTIAL_MULTIPLIER.parse("1.5") == 1.5
    with pytest.raises(InvalidOptionError, match="a number from 1 to 1000"):
        RestartStrategyOptions.EXPONENTIAL_MULTIPLIER.parse(text)


def test_an_error_never_shows_a_secret() -> None:
    with pytest.raises(InvalidOptionError) as caught:
        RestOptions.TOKEN.parse(" ")
    assert caught.value.value == "***"


@pytest.mark.parametrize(
    "labels",
    [{}, {"team": "payments"}, {"a b": "x:y, z", "quote": "it's", "empty": "", " padded ": 'say "no"', "comma": ","}],
)
def test_maps_are_read_as_they_are_printed(labels: dict[str, str]) -> None:
    option = PipelineOptions.GLOBAL_JOB_PARAMETERS
    assert option.parse(option.format(labels)) == labels


def test_maps_are_pairs_in_quotes_where_needed() -> None:
    found = PipelineOptions.GLOBAL_JOB_PARAMETERS.parse(""" team : payments, 'url':"https://h:1",'it''s':x """)
    assert found == {"team": "payments", "url": "https://h:1", "it's": "x"}


@pytest.mark.parametrize("text", ["a", "a:b:c", ":x", "a:'b", "a:b,a:c", ",", "a:b'c", "''"])
def test_other_texts_are_no_maps(text: str) -> None:
    with pytest.raises(InvalidOptionError, match=r"pipeline.global-job-parameters.*pairs such as"):
        PipelineOptions.GLOBAL_JOB_PARAMETERS.parse(text)
