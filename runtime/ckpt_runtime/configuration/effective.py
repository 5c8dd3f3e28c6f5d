"""Lists the effective options of a job and the origin of each value. Pure; secrets are masked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ckpt_runtime.configuration.configuration import Configuration, shown_value
from ckpt_runtime.configuration.option import OptionScope
from ckpt_runtime.configuration.own_configuration import OwnConfiguration
from ckpt_runtime.configuration.registry import INTERNAL_PREFIX, OPTIONS, canonical_key


class Origin(StrEnum):
    """Origins of a value, highest precedence first."""

    OVERRIDE = "override"
    CHANGE = "change"
    SUBMISSION = "submission"
    PIPELINE = "pipeline"
    CLUSTER = "cluster"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class EffectiveOption:
    """``value`` is as a user would write it, None for an option without a value; secrets are masked."""

    key: str
    value: str | None
    origin: Origin


def effective_options(
    own: OwnConfiguration,
    submitted: Collection[str],
    cluster: Configuration,
    overrides: Mapping[str, str | None],
) -> tuple[EffectiveOption, ...]:
    """Lists job options and the user's own keys, by key.

    ``submitted`` are the keys that came with the submission, ``overrides`` the values that replace them for now
    (FLIP-571), by key. A value that was neither submitted nor changed later was set by the pipeline.
    """
    sent = {canonical_key(key) for key in submitted}
    changed = {key for note in own.notes for key in note.options}
    found: dict[str, EffectiveOption] = {}
    for key, option in OPTIONS.items():
        if option.scope is OptionScope.JOB:
            text = cluster.get_text(key)
            origin = Origin.DEFAULT if text is None else Origin.CLUSTER
            found[key] = EffectiveOption(key, _shown(key, option.default_text if text is None else text), origin)
    for key, text in own.given.items():
        if not key.startswith(INTERNAL_PREFIX):
            origin = Origin.CHANGE if key in changed else Origin.SUBMISSION if key in sent else Origin.PIPELINE
            found[key] = EffectiveOption(key, _shown(key, text), origin)
    for key, text in overrides.items():
        found[key] = EffectiveOption(key, _shown(key, text), Origin.OVERRIDE)
    return tuple(found[key] for key in sorted(found))


def own_options(own: OwnConfiguration, submitted: Collection[str]) -> tuple[EffectiveOption, ...]:
    """Lists the job's own options only: the cluster's options of an ended job are not kept."""
    given = set(own.given.keys())
    return tuple(item for item in effective_options(own, submitted, Configuration(), {}) if item.key in given)


def _shown(key: str, value: str | None) -> str | None:
    return None if value is None else shown_value(key, value)
