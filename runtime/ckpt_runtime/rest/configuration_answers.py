"""Fills the contract's structs about configuration from the engine's values. Pure functions."""

from __future__ import annotations

from ckpt_runtime.checkpoint.configuration import CheckpointRetention
from ckpt_runtime.configuration.checkpoint_settings import CHECKPOINT_SETTINGS
from ckpt_runtime.contract import configuration as contract
from ckpt_runtime.contract.base import read
from ckpt_runtime.jobmaster.configuration_requests import ConfigurationAnswer
from ckpt_runtime.jobmaster.gateway_values import EffectiveCheckpointConfig, JobConfigInfo


def checkpoint_config(effective: EffectiveCheckpointConfig) -> contract.CheckpointConfig:
    """Flink's fields, then ``max_inflight_data_bytes`` and ``overrides`` (FLIP-571).

    The names of the settings on the wire come from the table of settings.
    """
    settings = effective.settings
    shown = {item.shown_as: getattr(settings, item.field) for item in CHECKPOINT_SETTINGS if item.shown_as is not None}
    names = {item.field: item.patched_as for item in CHECKPOINT_SETTINGS}
    document = {
        **shown,
        "mode": "exactly_once" if effective.exactly_once else "at_least_once",
        "interval": contract.PERIODIC_OFF if settings.interval_ms is None else settings.interval_ms,
        "externalization": {
            "enabled": settings.retention is not CheckpointRetention.NO_EXTERNALIZED_CHECKPOINTS,
            "delete_on_cancellation": settings.retention is not CheckpointRetention.RETAIN_ON_CANCELLATION,
        },
        "state_backend": effective.state_backend,
        "checkpoint_storage": effective.checkpoint_storage,
        "overrides": [names[field] for field in effective.overrides],
    }
    return read(document, contract.CheckpointConfig)


def job_config(config: JobConfigInfo) -> contract.JobConfig:
    """Flink's shape plus FLIP-530's ``configuration`` and ``version``."""
    changes = (
        contract.ConfigVersion(note.version, note.timestamp_ms, note.by, tuple(note.options)) for note in config.notes
    )
    options = (contract.EffectiveOption(option.key, option.value, option.origin) for option in config.effective)
    return contract.JobConfig(
        job_id=config.job_id,
        name=config.name,
        execution_config={
            "restart-strategy": config.restart_strategy,
            "job-parallelism": config.parallelism,
            "object-reuse-mode": False,
            "user-config": {},
        },
        configuration=dict(config.configuration),
        version=config.version,
        running_version=config.running_version,
        pipeline_id=config.pipeline_id,
        changes=tuple(changes),
        effective=tuple(options),
    )


def config_change(answer: ConfigurationAnswer) -> contract.ConfigChange:
    """Answers changes of ``/jobs/:jobid/config`` (FLIP-530)."""
    changes = {
        change.key: contract.OptionChange(
            change.before, change.after, "restart" if change.needs_restart else "live", change.hidden_by
        )
        for change in answer.changes
    }
    return contract.ConfigChange(answer.version, answer.needs_restart, answer.dry_run, changes)
