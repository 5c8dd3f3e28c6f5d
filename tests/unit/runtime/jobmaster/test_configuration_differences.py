"""How configurations differ by meaning, and which of that may change (FLIP-530)."""

from __future__ import annotations

import pytest

from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.option import (
    KEYS,
    Changeability,
    InvalidConfigurationError,
    InvalidOptionError,
    OptionScope,
)
from ckpt_runtime.configuration.registry import OPTIONS
from ckpt_runtime.jobmaster.configuration_updates import check_changeable, differences, not_allowed, with_kept_secrets

INTERVAL, BACKOFF = "execution.checkpointing.interval", "execution.checkpointing.min-pause"


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [change.key for change in differences(Configuration(before), Configuration(after))]


@pytest.mark.row("530.4")
@pytest.mark.parametrize(
    ("key", "one", "other"),
    [
        (INTERVAL, "10s", "10 s"),
        (INTERVAL, "10s", "10000ms"),
        ("state.storage.fs.memory-threshold", "1 kb", "1024"),
        ("execution.checkpointing.incremental", "true", "TRUE"),
        ("restart-strategy.type", "off", "none"),
        ("state.checkpoints.num-retained", "2", "2"),
    ],
)
def test_values_of_equal_meaning_are_no_difference(key: str, one: str, other: str) -> None:
    assert changed({key: one}, {key: other}) == []


@pytest.mark.row("530.4")
class TestDifferent:
    def test_differences_are_those_of_meaning_in_any_spelling(self) -> None:
        assert changed({INTERVAL: "1 s", "b": "1", "c": "1"}, {INTERVAL: "2 s", "a": "1", "c": "1 "}) == [
            "a", "b", "c", INTERVAL,
        ]  # fmt: skip
        new, old = "execution.checkpointing.num-retained", "state.checkpoints.num-retained"
        assert changed({old: "2"}, {new: "2"}) == []
        assert changed({}, {BACKOFF: "0 ms"}) == [BACKOFF]
        assert changed({"pipeline.max-parallelism": "-1"}, {}) == []


def test_options_that_can_never_change_are_refused_with_a_reason() -> None:
    before, after = Configuration({"pipeline.name": "a", INTERVAL: "1 s"}), Configuration({"pipeline.name": "b"})
    with pytest.raises(InvalidConfigurationError) as raised:
        check_changeable(differences(before, after))
    (problem,) = raised.value.problems
    assert str(problem).startswith("pipeline.name: 'b' is not acceptable; allowed: what the job was submitted with, ")
    fixed = [option for option in OPTIONS.values() if option.changeability is Changeability.NEVER]
    lacking = [option.key for option in fixed if option.scope is OptionScope.JOB and not option.fixed_because]
    assert lacking == []


@pytest.mark.row("530.3")
@pytest.mark.parametrize(
    ("text", "refused"),
    [("", ("a", "b")), ("a", ("b",)), (" b , a ", ()), ("*", ()), ("c,*", ()), (",", None), ("a b", None)],
)
def test_the_allow_list(text: str, refused: tuple[str, ...] | None) -> None:
    changes = differences(Configuration(), Configuration({"a": "1", "b": "1"}))
    if refused is None:
        with pytest.raises(ValueError, match="separated by commas"):
            KEYS.parse(text)
    else:
        assert not_allowed(changes, KEYS.parse(text)) == refused


@pytest.mark.row("530.3")
def test_the_default_of_the_allow_list() -> None:
    option = OPTIONS["jobmanager.execution.dynamic-configuration.allow-list"]
    assert option.default == (INTERVAL, "pipeline.source.rates")
    assert option.default_text == f"{INTERVAL},pipeline.source.rates"
    with pytest.raises(InvalidOptionError):
        option.parse("a,,b")


@pytest.mark.row("530.10")
def test_values_that_come_back_masked_are_kept() -> None:
    present = Configuration({"my.password": "hush", "url": "http://me:hush@host/", "other": "******"})
    kept = with_kept_secrets(Configuration(present.displayed()), present)
    assert kept == present
    with pytest.raises(InvalidConfigurationError, match="new.password"):
        with_kept_secrets(Configuration({"new.password": "******"}), present)
    with pytest.raises(InvalidConfigurationError, match="new.url"):
        with_kept_secrets(Configuration({"new.url": "http://******@host/"}), present)
