"""Stack samples of a vertex's subtasks, taken by their workers when a client requests a flame graph."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from ckpt_runtime.jobmaster.control_endpoint import ANSWER_TIMEOUT_S
from ckpt_runtime.jobmaster.executions import wall_clock_ms
from ckpt_runtime.jobmaster.gateway_values import ExecutionState, VertexDetails
from ckpt_runtime.jobmaster.slot_pool import SlotPool
from ckpt_runtime.network.control_messages import SampledStack, SampledStacks, SampleStacks

SAMPLES = 100
INTERVAL_MS = 20


@dataclass(frozen=True, slots=True)
class StackSamples:
    """``ended_at_ms`` is None when no subtask of the vertex runs."""

    ended_at_ms: int | None
    stacks: tuple[SampledStack, ...] = ()


class FlameGraphs:
    """Takes samples; concurrent requests for the same vertex share them. Runs on the event loop."""

    def __init__(self, slots: SlotPool) -> None:
        self._slots = slots
        self._sampling: dict[tuple[str, str], asyncio.Task[StackSamples]] = {}

    async def of(self, job_id: str, vertex: VertexDetails) -> StackSamples:
        """Samples for some seconds. Raises NotReady when no worker answers."""
        running = {subtask.slot_agent_id for subtask in vertex.subtasks if subtask.state is ExecutionState.RUNNING}
        if not running:
            return StackSamples(None)
        key = (job_id, vertex.vertex_id)
        if key not in self._sampling:
            task = self._sampling[key] = asyncio.create_task(self._sample(*key, sorted(running)))
            task.add_done_callback(lambda _: self._sampling.pop(key))
            # All clients may have disconnected, and asyncio logs an error that is never retrieved.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        # A client that gives up does not cancel the sampling for the others.
        return await asyncio.shield(self._sampling[key])

    async def _sample(self, job_id: str, vertex_id: str, slots: list[str]) -> StackSamples:
        question = partial(SampleStacks, job_id=job_id, vertex_id=vertex_id, samples=SAMPLES, interval_ms=INTERVAL_MS)
        timeout_s = SAMPLES * INTERVAL_MS / 1000 + ANSWER_TIMEOUT_S
        answers = await asyncio.gather(
            *(self._slots.ask(slot, question, SampledStacks, timeout_s) for slot in slots), return_exceptions=True
        )
        given = [answer for answer in answers if isinstance(answer, SampledStacks)]
        if not given:
            raise next(answer for answer in answers if isinstance(answer, BaseException))
        return StackSamples(wall_clock_ms(), tuple(stack for answer in given for stack in answer.stacks))
