"""The job master's side of the talk with workers: which subtask is in which slot, and the messages to them."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Any

from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.properties import CheckpointOptions
from ckpt_runtime.jobmaster.slot_pool import Slot
from ckpt_runtime.scheduler.deployment import Deployment


class TaskGateway:
    """One deployment at a time: slot ``i`` runs subtask ``i`` of every vertex."""

    def __init__(self, archive: bytes) -> None:
        self._archive = base64.b64encode(archive).decode()
        self._sent_archive: set[str] = set()
        self._workers: list[tuple[Slot, str]] = []
        self.deployment = -1

    def close(self) -> None:
        """Nothing more is deployed; the archive goes."""
        self._archive = ""

    def deploy(self, slots: Sequence[Slot], deployments: Sequence[Deployment]) -> None:
        """Sends each worker its part. Every slot must have a worker."""
        self.deployment = deployments[0].deployment
        self._workers = []
        for slot, deployment in zip(slots, deployments, strict=True):
            assert slot.worker is not None
            worker = slot.worker
            worker.used = True
            message: dict[str, Any] = {"type": "deploy", "deployment": deployment.to_json()}
            if worker.worker_id not in self._sent_archive:
                self._sent_archive.add(worker.worker_id)
                message["archive"] = self._archive
            worker.peer.send(message)
            self._workers.append((slot, worker.worker_id))

    def lives(self, subtask: int) -> bool:
        """Whether the worker that got the subtask is still there."""
        if subtask >= len(self._workers):
            return False
        slot, worker_id = self._workers[subtask]
        return not slot.lost and slot.worker is not None and slot.worker.worker_id == worker_id

    def note_failure(self, subtask: int) -> None:
        """What the worker runs has failed in it."""
        slot, _ = self._workers[subtask]
        if self.lives(subtask) and slot.worker is not None:
            slot.worker.failures += 1

    def index_of(self, slot: Slot) -> int | None:
        """The subtask index that the slot hosts in this deployment."""
        return next((index for index, (known, _) in enumerate(self._workers) if known is slot), None)

    def cancel(self, subtask: int) -> bool:
        """Asks one worker to end its part; False when it is gone."""
        return self._send(subtask, {"type": "cancel"})

    def trigger(
        self, checkpoint_id: int, timestamp: int, options: CheckpointOptions, tasks: Iterable[ExecutionId]
    ) -> bool:
        """False when a trigger could not be delivered."""
        message = {
            "type": "trigger",
            "checkpoint_id": checkpoint_id,
            "timestamp": timestamp,
            "options": options.to_json(),
        }
        return self._send_by_slot(message, tasks)

    def complete(self, checkpoint_id: int, tasks: Iterable[ExecutionId]) -> None:
        self._send_by_slot({"type": "complete", "checkpoint_id": checkpoint_id}, tasks)

    def abort(self, checkpoint_id: int, latest_completed: int, tasks: Iterable[ExecutionId]) -> None:
        latest = None if latest_completed < 0 else latest_completed
        self._send_by_slot({"type": "abort", "checkpoint_id": checkpoint_id, "latest_completed": latest}, tasks)

    def _send_by_slot(self, message: dict[str, Any], tasks: Iterable[ExecutionId]) -> bool:
        by_slot: dict[int, list[list[Any]]] = {}
        for task in tasks:
            by_slot.setdefault(task.subtask, []).append([task.vertex_id, task.subtask])
        delivered = [self._send(subtask, {**message, "tasks": addressed}) for subtask, addressed in by_slot.items()]
        return all(delivered)

    def _send(self, subtask: int, message: dict[str, Any]) -> bool:
        if not self.lives(subtask):
            return False
        slot, _ = self._workers[subtask]
        assert slot.worker is not None
        slot.worker.peer.send({**message, "deployment": self.deployment})
        return True
