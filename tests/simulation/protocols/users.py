"""What users and the world do to a simulated job, at the times of its scenario."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.checkpoint.properties import CheckpointProperties, CheckpointType, SavepointFormat
from ckpt_runtime.scheduler import core_events as core_on
from ckpt_runtime.scheduler import job_events as job_on
from tests.simulation.protocols.event_loop import DriverCrash
from tests.simulation.protocols.files import SAVEPOINTS
from tests.simulation.schedules.schedule import Action

if TYPE_CHECKING:
    from tests.simulation.protocols.driver import Driver
    from tests.simulation.protocols.world import World

CALM = CheckpointOverrides(
    interval_ms=100, timeout_ms=1_000, min_pause_ms=0, max_concurrent=1, tolerable_failed_checkpoints=1_000
)
_LAST_REQUESTS_MS = 900
_VALUES = {
    "interval_ms": (20, 50, 100, 300, 1_000),
    "timeout_ms": (5, 10, 40, 100, 400, 4_000),
    "min_pause_ms": (0, 20, 50, 200),
    "max_concurrent": (1, 2, 3),
    "tolerable_failed_checkpoints": (0, 1, 2, 1_000),
    "unaligned_enabled": (False, True),
    "aligned_timeout_ms": (0, 30),
    "max_inflight_data_bytes": (0, 1_000),
}


class Users:
    """Requests reach the present driver, also one that is paused; it takes them up when it wakes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._requests = 0

    def act(self, action: Action) -> None:
        """Does one thing of the scenario."""
        world = self._world
        driver = world.present
        value = Random(action.value)
        if world.choices.fault("a user disposes of a snapshot", 0.2):
            world.loop.at(world.loop.now, driver.process, self._dispose, driver, value.random())
        match action.kind:
            case "fail a task" | "cut a connection":
                self._break(driver, action.kind, value)
            case "crash the driver":
                world.crash(driver)
            case "pause the driver":
                if value.random() < 0.4:
                    world.loop.at(world.loop.now, driver.process, self._ask, driver, "patch", value)
                    world.loop.at(world.loop.now + 1, None, world.pause, driver, value.choice((400, 700)))
                    return
                world.pause(driver, value.choice((50, 200, 400, 700)))
            case "jump the clock":
                world.loop.clock_offset += value.choice((-600_000, -1_000, 1_000, 600_000))
            case _:
                # Sent to the driver: a process that is paused or dead does what it then does.
                world.loop.at(world.loop.now, driver.process, self._ask, driver, action.kind, value)

    def calm(self) -> None:
        """Settings under which checkpoints can complete; asked for again while older requests are still coming in."""
        world = self._world
        if world.ha.result is not None or world.loop.now > world.calm_from + _LAST_REQUESTS_MS:
            return
        stored = CheckpointOverrides.from_document(world.ha.overrides)
        if stored.merged_with(CALM) != stored:
            driver = world.present
            world.loop.at(world.loop.now, driver.process, self._calm, driver)
        world.loop.at(world.loop.now + 40, None, self.calm)

    def _calm(self, driver: Driver) -> None:
        if not driver.shut_down:
            if driver.backlog:
                self._toggle_backlog(driver)
            driver.patch(CALM)

    def _break(self, driver: Driver, kind: str, value: Random) -> None:
        deployment = driver.deployment
        if deployment is None:
            return
        alive = [task for task in deployment.tasks.values() if not task.ended]
        if alive:
            task = value.choice(alive)
            if kind == "fail a task":
                deployment.fail(task)
            else:
                deployment.cut(task.execution.subtask)

    def _ask(self, driver: Driver, kind: str, value: Random) -> None:
        if driver.shut_down or driver.ended is not None or self._world.ha.result is not None:
            return
        match kind:
            case "checkpoint":
                self._trigger(driver, CheckpointProperties(full=value.random() < 0.3))
            case "savepoint":
                kind = SavepointFormat.CANONICAL if value.random() < 0.3 else SavepointFormat.NATIVE
                self._trigger(driver, CheckpointProperties(CheckpointType.SAVEPOINT, kind))
            case "cancel with a savepoint":
                self._cancel_with_savepoint(driver)
            case "patch":
                names = value.sample(sorted(_VALUES), value.choice((1, 1, 2)))
                changes: dict[str, Any] = {name: value.choice(_VALUES[name]) for name in names}
                driver.patch(CheckpointOverrides(**changes))
            case "reset overrides":
                driver.patch(None)
            case "stop":
                self._requests += 1
                request_id = f"stop-{self._requests}"
                driver.checker.stops.add(request_id)
                driver.tell(job_on.StopRequested(request_id, value.random() < 0.5, SAVEPOINTS))
            case "cancel":
                driver.tell(job_on.CancelRequested())
            case "rescale" | "replace the configuration" | "replace the restart strategy":
                driver.changes.ask(kind, value)
            case "suspend the driver":
                driver.tell(job_on.SuspendRequested())
                if value.random() < 0.5:
                    raise DriverCrash  # it does not wait for its clean-up
            case _:
                self._toggle_backlog(driver)

    def _dispose(self, driver: Driver, choice: float) -> None:
        """Of a savepoint, or of what the job began with; as in production not of what the driver says it needs."""
        files = self._world.files
        places = sorted({*files.savepoints, *files.user_owned})
        if not places or not driver.leads or driver.ended is not None or self._world.ha.result is not None:
            return
        place = places[int(choice * len(places))]
        origin = self._world.origin
        begins = origin is not None and origin.directory == place and driver.coordinator.latest_checkpoint is None
        if not begins and place not in driver.coordinator.referenced:
            files.forget(place)

    def _toggle_backlog(self, driver: Driver) -> None:
        driver.backlog = not driver.backlog
        driver.tell(on.BacklogChanged(driver.backlog))

    def _cancel_with_savepoint(self, driver: Driver) -> None:
        self._requests += 1
        name = f"request-{self._requests}"
        driver.changes.savepoints.add(name)
        driver.checker.cancels.add(name)
        trigger = on.TriggerRequested(name, CheckpointProperties(CheckpointType.SAVEPOINT), SAVEPOINTS)
        driver.tell(core_on.SavepointBeforeCancel(trigger))

    def _trigger(self, driver: Driver, properties: CheckpointProperties) -> None:
        self._requests += 1
        name = f"request-{self._requests}"
        if properties.is_savepoint:
            driver.changes.savepoints.add(name)
        driver.tell(on.TriggerRequested(name, properties, SAVEPOINTS))
