"""What must hold over all drivers of a job: what is committed is never undone, what is promised is kept.

Raises :class:`Violation` at the first wrong. What one driver does is checked by ``driver_checker``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason
from tests.simulation.protocols.client_view import ClientView
from tests.simulation.protocols.files import path_of

if TYPE_CHECKING:
    from tests.simulation.protocols.driver import Driver
    from tests.simulation.protocols.tasks import Deployment
    from tests.simulation.protocols.world import World


class ProtocolChecker:
    """One world's books. ``completed`` maps ids to whether they entered the store; ``newest`` is the last that did."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.clients = ClientView(world)
        self.completed: dict[int, bool] = {}
        self.aborted: set[int] = set()
        self.reasons: set[CheckpointFailureReason] = set()
        self.committed_id = 0
        self.last_completion_at = -1
        self.triggers = 0
        self.last_id = 0
        self.newest = 0
        self.notified = 0
        self.released: set[str] = set()
        self._kept = 0
        self._attempts: set[int] = set()
        self._deployments: list[tuple[int, int]] = []
        self._snapshots: dict[tuple[int, str, int], set[str]] = {}

    def require(self, holds: bool, message: str) -> None:
        if not holds:
            raise self._world.broke(message)

    def restoring(self, driver: Driver, checkpoint: CompletedCheckpoint | None) -> None:
        """Invariants 2 and 8: from the newest, which is whole, and never from before what was committed."""
        world = self._world
        number = 0 if checkpoint is None else checkpoint.id
        if driver.leads:
            present = max(world.ha.pointers, default=0)
            self.require(number == present, f"restores {number}, the newest pointer is {present}")
            self.require(number >= self.newest, f"restores {number}, completed is {self.newest}")
            self.require(number >= self.committed_id, f"restores {number} after {self.committed_id} was committed")
        if checkpoint is not None and driver.leads:
            missing = world.files.missing(checkpoint)
            self.require(not missing, f"restores {number}, which lacks {missing}")

    def deployed(self, deployment: Deployment) -> None:
        """One whose driver does not lead any more cannot commit, wherever it started from."""
        if deployment.driver.leads:
            self.require(self._world.ha.result is None, "a job that has ended is deployed")
            self._deployments.append((deployment.number, deployment.base_id))

    def attempts(self, driver: Driver, attempt: int) -> None:
        """Messages tell deployments apart by it."""
        if driver.leads:
            self.require(attempt not in self._attempts, f"attempt {attempt} is deployed twice")
            self._attempts.add(attempt)

    def committed(self, deployment: Deployment, number: int) -> None:
        """A sink commits. The attempt that runs now must have started from there or later."""
        self.require(
            number in self.completed or number in (deployment.base_id, self._world.origin_id),
            f"{number} is committed without being complete",
        )
        allowed = deployment.driver.checker.may_commit(number)
        self.require(allowed, f"{number} is committed between the savepoint and the cancellation behind it")
        self.committed_id = max(self.committed_id, number)
        for other, base in self._deployments:
            self.require(
                other <= deployment.number or base >= number,
                f"deployment {deployment.number} commits {number}, but deployment {other} started from {base}",
            )

    def duplicated(self, driver: Driver, number: int, sources: tuple[str, ...]) -> None:
        """What a savepoint has begun to duplicate is there until it has ended."""
        if driver.leads and number in driver.coordinator.pending_ids:
            lost = sorted(source for source in sources if path_of(source) not in self._world.files.files)
            self.require(not lost, f"{lost} are deleted while savepoint {number} duplicates them")

    def snapshot_taken(self, number: int, execution: ExecutionId, path: str) -> None:
        self._snapshots.setdefault((number, *execution.key), set()).add(path)

    def snapshots_of(self, number: int, vertex_id: str, index: int) -> set[str]:
        """Paths that this subtask wrote for the checkpoint and acknowledged."""
        return self._snapshots.get((number, vertex_id, index), set())

    # --- storage

    def result_stored(self, driver: Driver) -> None:
        later = self._world.present.epoch
        self.require(later <= driver.epoch, f"driver {driver.epoch} stores a result while driver {later} runs the job")

    def failures_kept(self, failures: tuple[Mapping[str, Any], ...]) -> None:
        """They are durable, and their driver knows."""
        self._kept = len(failures)

    def failures_found(self, driver: Driver) -> None:
        shown, stored = driver.shell.view.failures_to_store(), list(self._world.ha.failures)
        self.require(shown == stored, f"driver {driver.epoch} shows the failures {shown}, stored are {stored}")
        self.require(len(stored) >= self._kept, f"of {self._kept} failures that were stored {len(stored)} are left")

    def pointer_added(self, driver: Driver, checkpoint: CompletedCheckpoint) -> None:
        """Also one of a driver that does not lead any more is found by the next one, which has adopted nothing yet."""
        missing = self._world.files.missing(checkpoint)
        self.require(not missing, f"a pointer to checkpoint {checkpoint.id}, which lacks {missing}")
        self.require(checkpoint.id not in self.aborted, f"a pointer to the aborted checkpoint {checkpoint.id}")
