"""FLIP-571 overrides: which checkpointing settings were changed while the job ran, and their stored form. Pure.

The document is stored in the plan's job configuration under ``JOB_CHECKPOINT_OVERRIDES``. Its keys are the field names
of the REST request, its values JSON integers and booleans; unknown keys are rejected, not dropped, since dropping one
would silently change how a job runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration, CheckpointConfigurationError
from ckpt_runtime.configuration.checkpoint_settings import PATCHABLE
from ckpt_runtime.configuration.registry import JOB_CHECKPOINT_OVERRIDES

_NAMES = {setting.field: name for name, setting in PATCHABLE.items()}


class CheckpointOverrides:
    """Holds the overridden fields of :class:`CheckpointConfiguration` and their values. Immutable.

    A field that is None or not given leaves the submitted value in force.
    """

    __slots__ = ("given",)
    given: Mapping[str, int | bool]

    def __init__(self, **fields: int | bool | None) -> None:
        unknown = fields.keys() - _NAMES
        if unknown:
            raise TypeError(f"{', '.join(sorted(unknown))}: cannot be overridden; allowed are {', '.join(_NAMES)}")
        # in the table's order, so that the output does not depend on the order of requests
        self.given = {name: value for name in _NAMES if (value := fields.get(name)) is not None}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckpointOverrides) and self.given == other.given

    def __hash__(self) -> int:
        return hash(tuple(self.given.items()))

    def __repr__(self) -> str:
        return f"CheckpointOverrides({', '.join(f'{name}={value}' for name, value in self.given.items())})"

    @property
    def request_fields(self) -> dict[str, int | bool]:
        """The overridden values by the names of the REST request."""
        return {_NAMES[name]: value for name, value in self.given.items()}

    def merged_with(self, later: CheckpointOverrides) -> CheckpointOverrides:
        """Merges both; ``later`` takes precedence."""
        return CheckpointOverrides(**{**self.given, **later.given})

    def applied_to(self, submitted: CheckpointConfiguration) -> CheckpointConfiguration:
        """Returns the effective settings, which have the same limits as at submission.

        Raises :class:`CheckpointConfigurationError` if a value, or the combination, is outside them. Overrides must
        pass this check before they are stored; otherwise the next start of the job would fail.
        """
        changes: dict[str, Any] = {**self.given}
        return replace(submitted, **changes).effective()

    def to_document(self) -> str:
        """Returns the stored form, which is the same for equal overrides."""
        return json.dumps(self.request_fields, sort_keys=True)

    @classmethod
    def from_document(cls, document: str | None) -> CheckpointOverrides:
        """Reads the stored form; None (a job stored without overrides) means no override.

        Raises :class:`CheckpointConfigurationError` on anything else.
        """
        if document is None:
            return cls()
        try:
            values = json.loads(document)
        except ValueError as error:
            raise CheckpointConfigurationError(f"{JOB_CHECKPOINT_OVERRIDES} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointConfigurationError(f"{JOB_CHECKPOINT_OVERRIDES} is {values!r}; it must be an object")
        for name, value in values.items():
            if name not in PATCHABLE:
                raise CheckpointConfigurationError(f"{name!r} is not a known field; allowed are {', '.join(PATCHABLE)}")
            if type(value) is not (bool if PATCHABLE[name].is_flag else int):
                kind = "true or false" if PATCHABLE[name].is_flag else "an integer"
                raise CheckpointConfigurationError(f"{name} is {value!r}; it must be {kind}")
        return cls(**{PATCHABLE[name].field: value for name, value in values.items()})
