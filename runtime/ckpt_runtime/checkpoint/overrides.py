"""FLIP-571 overrides: which checkpointing settings were changed while the job ran, and their stored form. Pure.

The document lies in the stored plan's job configuration under ``JOB_CHECKPOINT_OVERRIDES``. Its keys are the field
names of the REST request, its values JSON integers and booleans; keys that a version does not know are refused, not
dropped, since dropping one would silently change how a job runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration, CheckpointConfigurationError
from ckpt_runtime.configuration.registry import JOB_CHECKPOINT_OVERRIDES

_DOCUMENT_NAMES = {
    "interval_ms": "checkpointInterval",
    "timeout_ms": "checkpointTimeout",
    "min_pause_ms": "minPauseBetweenCheckpoints",
    "max_concurrent": "maxConcurrentCheckpoints",
    "tolerable_failures": "tolerableCheckpointFailureNumber",
    "aligned_timeout_ms": "alignedCheckpointTimeout",
    "unaligned_enabled": "unalignedEnabled",
    "max_inflight_data_bytes": "maxInflightDataBytes",
}


@dataclass(frozen=True, slots=True)
class CheckpointOverrides:
    """None leaves the submitted value in force. Field names are those of :class:`CheckpointConfiguration`."""

    interval_ms: int | None = None
    timeout_ms: int | None = None
    min_pause_ms: int | None = None
    max_concurrent: int | None = None
    tolerable_failures: int | None = None
    aligned_timeout_ms: int | None = None
    unaligned_enabled: bool | None = None
    max_inflight_data_bytes: int | None = None

    @property
    def given(self) -> dict[str, int | bool]:
        """The overridden fields and their values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def merged_with(self, later: CheckpointOverrides) -> CheckpointOverrides:
        """Both, where ``later`` wins."""
        return CheckpointOverrides(**{**self.given, **later.given})  # type: ignore[arg-type]

    def applied_to(self, submitted: CheckpointConfiguration) -> CheckpointConfiguration:
        """The effective settings, within the limits of a submission.

        Raises :class:`CheckpointConfigurationError` when a value, or the combination, is outside them; what is stored
        must have passed this, or the next start of the job would fail.
        """
        changes: dict[str, Any] = self.given
        return replace(submitted, **changes).effective()

    def to_document(self) -> str:
        """The stored form, the same for equal overrides."""
        return json.dumps({_DOCUMENT_NAMES[name]: value for name, value in self.given.items()}, sort_keys=True)

    @classmethod
    def from_document(cls, document: str | None) -> CheckpointOverrides:
        """Reads the stored form; None (a job stored without any) is no override.

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
        return cls.from_fields(values)

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> CheckpointOverrides:
        """From request field names. Raises :class:`CheckpointConfigurationError` naming the field and its value."""
        attributes = {document: name for name, document in _DOCUMENT_NAMES.items()}
        given: dict[str, Any] = {}
        for document_name, value in values.items():
            if document_name not in attributes:
                allowed = ", ".join(attributes)
                raise CheckpointConfigurationError(f"{document_name!r} is not a known field; allowed are {allowed}")
            name = attributes[document_name]
            expected = bool if name == "unaligned_enabled" else int
            if type(value) is not expected:
                kind = "true or false" if expected is bool else "an integer"
                raise CheckpointConfigurationError(f"{document_name} is {value!r}; it must be {kind}")
            given[name] = value
        return cls(**given)
