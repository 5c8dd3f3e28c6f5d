"""Properties of options: every value survives being printed and read, and no text breaks a configuration."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.option import (
    InvalidOptionError,
    OptionScope,
    format_duration,
    format_memory_size,
    parse_duration,
    parse_memory_size,
)
from ckpt_runtime.configuration.registry import OPTIONS
from ckpt_runtime.configuration.validation import find_problems

amounts = st.integers(0, (1 << 63) - 1)
keys = st.sampled_from([*OPTIONS, "acme.a", "acme.b"])
texts = st.sampled_from(["1", "10s", "10 s", "10000", "10000ms", "true", "x", ""]) | st.text(max_size=8)
configurations = st.dictionaries(keys, texts, max_size=6).map(Configuration)


@given(amounts)
def test_durations_and_sizes_survive_being_printed(amount: int) -> None:
    assert parse_duration(format_duration(amount)) == amount
    assert parse_memory_size(format_memory_size(amount)) == amount


@given(st.text(max_size=30))
def test_options_refuse_or_accept_any_text_without_a_crash(text: str) -> None:
    for option in OPTIONS.values():
        try:
            value = option.parse(text)
        except InvalidOptionError:
            continue
        assert option.parse(option.format(value)) == value


@given(configurations)
def test_checking_never_raises(configuration: Configuration) -> None:
    for scope in OptionScope:
        find_problems(configuration, scope)
