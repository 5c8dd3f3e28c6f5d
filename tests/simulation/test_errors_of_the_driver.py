"""Errors of the driver's own code, raised at every place of a job: the job fails and restarts, and never stalls.

Real shell, storage effects, core and gateway in virtual time: the simulation of the protocols without its own faults.
Its checks at the end find a job that hangs, a request without an answer, and files without an owner.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.jobmaster.event_log import JobAnnouncer
from ckpt_runtime.jobmaster.job_host import JobSlots, JobTimers, SnapshotDeletions
from ckpt_runtime.jobmaster.job_shell import JobShell
from ckpt_runtime.jobmaster.job_view import JobView
from ckpt_runtime.jobmaster.progress import JobProgress
from ckpt_runtime.jobmaster.storage_effects import StorageEffects
from ckpt_runtime.jobmaster.task_gateway import TaskGateway
from ckpt_runtime.scheduler import job_effects as job_out
from ckpt_runtime.scheduler.job_machine import JobMachine
from tests.simulation.protocols import driver as simulated_driver
from tests.simulation.protocols import world as simulated_world
from tests.simulation.protocols.host import DriverHost
from tests.simulation.protocols.record import HaRecord
from tests.simulation.protocols.scenario import Scenario, simple_graph
from tests.simulation.protocols.world import World
from tests.simulation.schedules.schedule import Action
from tests.simulation.simulated_driver import StrictShell

ERRORS: tuple[Callable[[], Exception], ...] = (
    OSError,
    lambda: OSError(errno.ENOSPC, "No space left on device"),
    lambda: PermissionError(errno.EACCES, "Permission denied"),
    lambda: RuntimeError("a bug"),
)
JOB_PLACES = [
    *((JobShell, name) for name in ("_arrange_slots", "_deploy", "_cancel_tasks", "_record_attempt", "_schedule")),
    *((JobShell, name) for name in ("_store_result", "_task_message", "_task_state", "_reported_failure")),
    *((JobShell, name) for name in ("_in_pool", "_execute_checkpoint_effect", "_worker_message", "_shut_down")),
    (JobShell, "_end"),
    *((JobTimers, name) for name in ("start", "_fire")),
    *((TaskGateway, name) for name in ("deploy", "trigger", "complete", "abort", "cancel")),
    *((JobSlots, name) for name in ("acquire", "_acquired", "release_all")),
    *((JobView, name) for name in ("status_changed", "deploying", "result_to_store")),
    *((StorageEffects, name) for name in ("execute", "_initialize", "_write_metadata", "_metadata_written")),
    *((StorageEffects, name) for name in ("_add_pointer", "_remove_pointer", "_find_leftovers")),
    *((StorageEffects, name) for name in ("_in_pool", "completed", "finish")),
    (SnapshotDeletions, "_attempt"),
    *((DriverHost, name) for name in ("acquire_slots", "in_pool", "release_slot", "next_deployment")),
    *((HaRecord, name) for name in ("reserve", "begin_attempt", "add", "remove", "end", "check")),
    (JobMachine, "handle"),
    (CheckpointCoordinator, "handle"),
]
"""Where the code of a job does something that may fail."""
DELETIONS = [
    *((StorageEffects, name) for name in ("_delete", "_discard", "_delete_location")),
    *((SnapshotDeletions, name) for name in ("submit", "_start")),
]
REPORTS = [
    *((JobProgress, name) for name in ("deployed", "acknowledged", "completed", "aborted")),
    *((JobAnnouncer, name) for name in ("_announce", "_looked")),
    *((JobView, name) for name in ("enter", "deployed")),
    (JobShell, "_record_failure"),
]
BUSY = (
    Action(497, "savepoint", 1),
    Action(500, "fail a task", 2),
    Action(700, "patch", 3),
    Action(900, "rescale", 4),
    Action(1_100, "savepoint", 5),
    Action(1_300, "fail a task", 6),
)


def _fail(
    monkeypatch: pytest.MonkeyPatch, owner: type[Any], name: str, error: Callable[[], Exception], first: int, last: int
) -> list[int]:
    """Calls of that number raise, before they do anything. Returns the numbers of those that did."""
    original: Callable[..., Any] = getattr(owner, name)
    calls, raised = [0], list[int]()

    def failing(self: Any, *arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if first <= calls[0] <= last:
            raised.append(calls[0])
            raise error()
        return original(self, *arguments, **named)

    monkeypatch.setattr(owner, name, failing)
    return raised


def _run(monkeypatch: pytest.MonkeyPatch) -> World:
    """A job that takes checkpoints, fails and is rescaled, whose shell is that of production."""
    monkeypatch.delattr(StrictShell, "_cause_in")
    monkeypatch.delattr(StrictShell, "__init__")
    # What is to be cancelled may not have been deployed.
    monkeypatch.setitem(simulated_driver._OBSERVES, job_out.CancelTasks, lambda driver, _: driver.changes.cancels())
    settings = CheckpointConfiguration(interval_ms=60, timeout_ms=400, tolerable_failed_checkpoints=1)
    graph = simple_graph(2, 2, (Partitioning.HASH,))
    scenario = Scenario(graph, settings, chaos_ms=1_350, calm_ms=800, actions=BUSY, fault_scale=0.0, plain=True)
    world = World(1, scenario)
    world.run()
    return world


@pytest.mark.parametrize("first", [1, pytest.param(3, marks=pytest.mark.long)], ids=["at-once", "later"])
@pytest.mark.parametrize(("owner", "name"), JOB_PLACES, ids=lambda value: getattr(value, "__name__", value))
def test_an_error_of_the_driver_fails_the_job_and_never_stalls_it(
    owner: type[Any], name: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ERRORS[(first + len(name)) % len(ERRORS)]
    raised = _fail(monkeypatch, owner, name, error, first, first)
    _run(monkeypatch)
    assert raised or first > 1


@pytest.mark.parametrize(("owner", "name"), DELETIONS, ids=lambda value: getattr(value, "__name__", value))
def test_files_whose_deletion_is_not_begun_are_deleted_at_the_end_of_the_job(
    owner: type[Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated_world, "check_files", lambda _: None)
    raised = _fail(monkeypatch, owner, name, ERRORS[3], 1, 3)
    _run(monkeypatch)
    assert raised


@pytest.mark.parametrize(("owner", "name"), REPORTS, ids=lambda value: getattr(value, "__name__", value))
def test_reports_that_always_fail_are_counted_and_change_nothing(
    owner: type[Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = _fail(monkeypatch, owner, name, ERRORS[len(name) % len(ERRORS)], 1, 1 << 30)
    world = _run(monkeypatch)
    assert world.present.shell.failed_reports == len(raised) > 0
    assert world.deployments == 3
