"""Where the value of each option comes from."""

from __future__ import annotations

from ckpt_runtime.configuration.configuration import (
    ChangeNote,
    Configuration,
    EffectiveOption,
    Origin,
    OwnConfiguration,
    effective_options,
    own_options,
)

INTERVAL, TIMEOUT = "execution.checkpointing.interval", "execution.checkpointing.timeout"
RETAINED, UNALIGNED = "execution.checkpointing.num-retained", "execution.checkpointing.unaligned.enabled"
PARALLELISM = "parallelism.default"


def effective(own: OwnConfiguration, **overrides: str) -> dict[str, EffectiveOption]:
    found = effective_options(
        own, {INTERVAL, "my.password"}, Configuration({RETAINED: "3", INTERVAL: "1 h"}), overrides
    )
    assert [option.key for option in found] == sorted({option.key for option in found})
    return {option.key: option for option in found}


def test_each_layer_is_named() -> None:
    given = Configuration({INTERVAL: "5s", TIMEOUT: "1 min", PARALLELISM: "4", "my.password": "x", "$internal.y": "z"})
    own = OwnConfiguration(given, 2, (ChangeNote(2, 0, "me", (TIMEOUT, UNALIGNED)),))
    found = effective(own)
    assert found[INTERVAL] == EffectiveOption(INTERVAL, "5s", Origin.SUBMISSION)
    assert found[TIMEOUT] == EffectiveOption(TIMEOUT, "1 min", Origin.CHANGE)
    assert found[PARALLELISM] == EffectiveOption(PARALLELISM, "4", Origin.PIPELINE)
    assert found[RETAINED] == EffectiveOption(RETAINED, "3", Origin.CLUSTER)
    assert found[UNALIGNED] == EffectiveOption(UNALIGNED, "false", Origin.DEFAULT)
    assert found["my.password"] == EffectiveOption("my.password", "******", Origin.SUBMISSION)
    assert "$internal.y" not in found
    assert "rest.port" not in found


def test_an_override_hides_what_was_submitted() -> None:
    own = OwnConfiguration(Configuration({INTERVAL: "5s"}))
    assert effective(own, **{INTERVAL: "1 s"})[INTERVAL] == EffectiveOption(INTERVAL, "1 s", Origin.OVERRIDE)


def test_a_job_that_has_ended_shows_what_it_was_given() -> None:
    own = OwnConfiguration(Configuration({INTERVAL: "5s", PARALLELISM: "4"}))
    assert own_options(own, {INTERVAL}) == (
        EffectiveOption(INTERVAL, "5s", Origin.SUBMISSION),
        EffectiveOption(PARALLELISM, "4", Origin.PIPELINE),
    )
