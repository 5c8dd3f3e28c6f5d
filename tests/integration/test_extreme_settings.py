"""A job whose options all have their greatest values, and one with the least: both work, and so do their workers."""

from __future__ import annotations

import pytest

from ckpt_runtime.configuration import option as kinds
from ckpt_runtime.configuration.option import ConfigOption, OptionScope
from ckpt_runtime.configuration.registry import OPTIONS
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import ROCKSDB, SequenceJob

pytestmark = [pytest.mark.slow, pytest.mark.long]

GREATEST_MS = 2**63 - 1
USED = {
    "execution.checkpointing.interval": "200ms",
    "execution.checkpointing.unaligned.enabled": "true",
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": "1000",
    "restart-strategy.fixed-delay.delay": "0 ms",
    "taskmanager.network.memory.buffer-debloat.enabled": "true",
    **ROCKSDB,
}
"""What makes the other options matter."""
LEFT_OUT = {
    # No checkpoint completes within the least timeout, and the job would end at once.
    False: {"execution.checkpointing.timeout", "execution.stop-after"},
    True: {"execution.checkpointing.min-pause"},  # a second checkpoint would never come
}
"""By whether the greatest value is taken."""


def extreme(option: ConfigOption, greatest: bool) -> str | None:
    """The greatest or least value of a number, a size or a duration; None for other options."""
    match option.type:
        case kinds.DurationType(minimum):
            return f"{GREATEST_MS if greatest else minimum} ms"
        case kinds.IntegerType(minimum, maximum) | kinds.FloatType(minimum, maximum):
            return str(maximum if greatest else minimum)
        case kinds.MemorySizeType(minimum, maximum):
            return f"{maximum if greatest else minimum} b"
    return None


def extremes(greatest: bool) -> dict[str, str]:
    """The extreme value of each option of a job that has one and that the test does not need for itself."""
    found = {
        key: extreme(option, greatest)
        for key, option in OPTIONS.items()
        if option.scope is OptionScope.JOB and key not in USED and key not in LEFT_OUT[greatest]
    }
    return {key: value for key, value in found.items() if value is not None and not key.endswith("parallelism")}


@pytest.mark.parametrize("greatest", [True, False])
def test_a_job_with_extreme_settings_recovers_and_ends_exactly_and_costs_no_worker(
    cluster: MiniCluster, job: SequenceJob, greatest: bool
) -> None:
    ended = len(cluster.call(cluster.dispatcher.ended_worker_logs()))
    job.start(rate=500, parallelism=2, configuration={**extremes(greatest), **USED})
    job.running()
    cluster.wait_for_checkpoints(job.job_id, 2)
    job.inject("processor-raise")
    job.restarted(1)
    job.stopped()
    # The end of a job that still runs is another way: its tasks are given the time that an option says.
    job.start(rate=500, parallelism=2, configuration={**extremes(greatest), **USED})
    job.running()
    job.canceled()
    assert len(cluster.call(cluster.dispatcher.ended_worker_logs())) == ended
