"""Decides whether a checkpoint whose timeout has passed gets more time, because it is nearly done. Pure.

Automates what a user does by hand with FLIP-571. Runs only when a timeout passes, so no checkpoint expires earlier.
"""

from __future__ import annotations

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.pending_checkpoint import PendingCheckpoint


def rescued_until(pending: PendingCheckpoint, configuration: CheckpointConfiguration, now_ms: int) -> int | None:
    """The new deadline in monotonic milliseconds; None if the checkpoint has to expire.

    A checkpoint is nearly done if at least ``rescue_min_progress`` percent of its subtasks have acknowledged. It gets
    ``rescue_extension_ms`` more, repeatedly as long as data is persisted in each extension, but never more than
    ``rescue_max_extension_ms`` beyond its timeout.
    """
    if not configuration.rescue_enabled:
        return None
    done, whole = len(pending.acknowledged), len(pending.plan.to_wait_for)
    if done * 100 < configuration.rescue_min_progress * whole or pending.progress == pending.progress_at_extension:
        return None
    end = pending.started_at + configuration.timeout_ms + configuration.rescue_max_extension_ms
    until = min(now_ms + configuration.rescue_extension_ms, end)
    return until if until > now_ms else None
