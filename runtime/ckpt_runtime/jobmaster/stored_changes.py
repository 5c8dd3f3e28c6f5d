"""Changes of a living job's stored settings and plan: how each is made, and what its outcome means."""

from __future__ import annotations

from ckpt_runtime.checkpoint.configuration import CheckpointConfigurationError
from ckpt_runtime.jobmaster.job_record import JobRecord
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler.core_events import JobInput
from ckpt_runtime.storage.crash_points import crash_point
from ckpt_runtime.storage.errors import AmbiguousWriteError, NotFoundError, StorageError

UNKNOWN_PAUSE_MS = 200.0
_SETTLE_PAUSE_MS = 30_000.0

Order = core.StoreOverrides | core.SettleOverrides | core.StorePlan | core.SettlePlan


def carry_out(record: JobRecord, order: Order) -> JobInput:
    """Makes the change; call it in a pool thread. Raises NotLeaderError, and errors that :func:`unconfirmed` maps."""
    match order:
        case core.StoreOverrides(request_id, change):
            crash_point("patch-before")
            text = record.change_overrides(change)
            crash_point("patch-persisted")
            return core.OverridesStored(request_id, text)
        case core.SettleOverrides(request_id):
            return core.OverridesStored(request_id, record.settle_overrides())
        case core.StorePlan(request_id, graph, own):
            crash_point("plan-before")
            record.store_plan(graph, own)
            crash_point("plan-persisted")
            return core.PlanStored(request_id)
        case core.SettlePlan(request_id, graph, own):
            if record.settle_plan(graph, own):
                return core.PlanStored(request_id)
            return core.ChangeNotStored(request_id, "it was not stored", final=True)


def unconfirmed(order: Order, error: Exception) -> JobInput:
    """Maps an error of :func:`carry_out`, or of its pool, to an event."""
    match error:
        case CheckpointConfigurationError():
            return core.OverridesRefused(order.request_id, str(error))
        case AmbiguousWriteError():
            return core.ChangeUnknown(order.request_id, str(error))
        case StorageError():
            text = f"the change could not be stored, nothing has changed: {error}"
            return core.ChangeNotStored(order.request_id, text, final=isinstance(error, NotFoundError))
    return core.ChangeUnknown(order.request_id, str(error))


def pause_before_ms(order: Order) -> float:
    """The pause in milliseconds, longer with each attempt; settling an unknown outcome may take longer."""
    if isinstance(order, core.StoreOverrides | core.StorePlan):
        return order.attempt * UNKNOWN_PAUSE_MS
    return float(min(_SETTLE_PAUSE_MS, UNKNOWN_PAUSE_MS * 2 ** min(order.attempt + 1, 10)))
