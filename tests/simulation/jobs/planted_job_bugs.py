"""Bugs to plant in what the simulation of whole jobs runs, each a small patch, most after what other engines met.

Each has to be found within ``ENOUGH`` seeds; one that is not is a defect of the simulator.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial

import pyarrow as pa

from ckpt_runtime.checkpoint import channel_state_assignment as assignment
from ckpt_runtime.checkpoint.barrier_handler import BarrierHandler
from ckpt_runtime.checkpoint.retention import Retention
from ckpt_runtime.checkpoint.shared_state_registry import SharedStateRegistry
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.graph.key_groups import key_group_range, owner_of_key_group
from ckpt_runtime.jobmaster import snapshot_clean_up
from ckpt_runtime.jobmaster.job_slots import JobSlots
from ckpt_runtime.jobmaster.snapshot_claims import JobClaims
from ckpt_runtime.jobmaster.task_gateway import TaskGateway
from ckpt_runtime.network.credit import SenderCredit
from ckpt_runtime.network.elements import CheckpointBarrier, Watermark
from ckpt_runtime.network.gate import InputChannel
from ckpt_runtime.network.output_queue import OutputQueue
from ckpt_runtime.network.remote_subpartition import RemoteSubpartition
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler.job_core import JobCore
from ckpt_runtime.scheduler.live_changes import LiveChanges
from ckpt_runtime.state.shared_files import SharedFiles
from ckpt_runtime.storage import disposal
from ckpt_runtime.storage.errors import NotFoundError
from ckpt_runtime.task import restore, restored_input, subtask_checkpoints
from ckpt_runtime.task.chain import OperatorChain
from ckpt_runtime.task.in_flight import PersistedBuffers
from ckpt_runtime.task.output import LocalSubpartition, ResultPartition
from ckpt_runtime.task.restored_input import RestoredInput
from ckpt_runtime.task.rows_in_work import RowsInWork
from ckpt_runtime.task.snapshot_files import NewFiles
from ckpt_runtime.task.subtask import Subtask
from ckpt_runtime.task.subtask_checkpoints import SubtaskCheckpoints
from ckpt_runtime.task.watermark_valve import WatermarkValve
from tests.simulation.jobs import world
from tests.simulation.planted import registry
from tests.simulation.planted.registry import PlantedBug, nothing

ENOUGH = 2_000
BUGS: list[PlantedBug] = []
RARE = frozenset(
    {
        "barriers overtake on edges where they must stay in order",
        "recording is for the newest checkpoint only",
        "an open snapshot goes on after its abort",
        "an end of a channel is no sign for a checkpoint",
        "a file of an aborted checkpoint is referred to",
        "a producer is not woken when there is room again",
        "in-flight data of a key goes to the first new owner only",
        "in-flight data of a rebalanced channel is given to subtasks that existed before only",
        "output streams keep the receiver's index as their sender",
        "watermarks of old channels count for new ones",
    }
)
"""Those that take more than 60 seeds, one of them some three hundred; ``make test-long`` looks for them."""


bug = partial(registry.bug, bugs=BUGS)


# --- what a barrier overtakes


@bug("a barrier overtakes an aligned barrier", "76.8, protocols 3.6")
def _():
    original = OutputQueue._place

    def place(self, queued, barrier, end, limit):
        parked = [element for element in queued[:end] if isinstance(element, CheckpointBarrier)]
        rest = [element for element in queued[:end] if not isinstance(element, CheckpointBarrier)]
        overtaken = original(self, [*rest, *queued[end:]], barrier, len(rest), limit)
        now = list(self._queue)
        at = next(place for place, element in enumerate(now) if element is barrier)
        self._queue = deque([*now[: at + 1], *parked, *now[at + 1 :]])
        return overtaken

    return [(OutputQueue, "_place", place)]


@bug("a barrier moved to the front is left in its old place as well", "the deadline of the aligned timeout, twice")
def _():
    def turn(self, checkpoint_id, limit=None):
        queued = list(self._queue)
        for position, element in enumerate(queued):
            if isinstance(element, CheckpointBarrier) and element.checkpoint_id == checkpoint_id:
                return self._place(queued, element, position, limit)
        return []

    return [(OutputQueue, "turn_unaligned", turn)]


@bug("what a barrier overtakes in a queue is not kept", "76.2")
def _():
    original = OutputQueue.add_barrier
    return [(OutputQueue, "add_barrier", lambda self, *rest: original(self, *rest)[:0])]


@bug("what a barrier overtakes when it turns at the deadline is not kept", "76.3")
def _():
    original = OutputQueue.turn_unaligned
    return [(OutputQueue, "turn_unaligned", lambda self, *rest: original(self, *rest)[:0])]


@bug("the barrier is put in front of data that is not kept as the bound is reached", "76.1")
def _():
    original = OutputQueue._place

    def place(self, queued, barrier, end, limit):
        overtaken = original(self, queued, barrier, end, None)
        size = 0
        kept = []
        for element in reversed(overtaken):
            size += element.size if isinstance(element, pa.Buffer) else 0
            if limit is not None and size > limit:
                break
            kept.insert(0, element)
        return kept

    return [(OutputQueue, "_place", place)]


@bug("barriers overtake on edges where they must stay in order", "FLINK-33693, mutant 20")
def _():
    return [(ResultPartition, "_overtakes", property(lambda self: True, lambda self, value: None))]


@bug("watermarks in an output queue are not kept", "76.2")
def _():
    original = OutputQueue._place

    def place(self, *rest):
        return [element for element in original(self, *rest) if not isinstance(element, Watermark)]

    return [(OutputQueue, "_place", place)]


# --- what is recorded of the inputs


@bug("the rest of the batch in work is not recorded", "76.2, mutant 17")
def _():
    return [(Subtask, "rest_in_work", nothing)]


@bug("the whole batch in work is recorded", "rows twice, FLINK-40016")
def _():
    def rest(self):
        batch = self._work._batch
        return None if batch is None or self._work.channel is None else (self._work.channel, batch)

    return [(Subtask, "rest_in_work", rest)]


@bug("what stands before an announced barrier is recorded twice", "76.2, mutant 18")
def _():
    original = SubtaskCheckpoints._stop_recording

    def stop(self, checkpoint_id, index, ended):
        original(self, checkpoint_id, index, ended)
        if checkpoint_id in self._open:
            self._open[checkpoint_id].recording.add(index)
            self.records = True

    return [(SubtaskCheckpoints, "_stop_recording", stop)]


@bug("what stands before an announced barrier is not recorded", "76.2, FLINK-20645")
def _():
    return [(SubtaskCheckpoints, "_stop_recording", lambda self, checkpoint_id, index, ended: None)]


@bug("recording is for the newest checkpoint only", "FLINK-20645, mutant 17")
def _():
    def record(self, channel, element):
        if self._open:
            snapshot = self._open[max(self._open)]
            if channel.index in snapshot.recording:
                snapshot.inputs[channel.index].elements.append(element)

    return [(SubtaskCheckpoints, "record", record)]


@bug("watermarks in an input channel are not recorded", "76.2")
def _():
    original = InputChannel.queued_before

    def queued(self, checkpoint_id, *, or_all=False):
        found = original(self, checkpoint_id, or_all=or_all)
        return [element for element in found if not isinstance(element, Watermark)]

    return [(InputChannel, "queued_before", queued)]


@bug("the schema of a recorded channel is that of the moment of the snapshot", "rows that nobody can read", seed=54)
def _():
    original = SubtaskCheckpoints._stop_recording

    def stop(self, checkpoint_id, index, ended):
        snapshot = self._open.get(checkpoint_id)
        before = None if snapshot is None else snapshot.inputs[index].schema
        original(self, checkpoint_id, index, ended)
        if snapshot is not None:
            snapshot.inputs[index].schema = before

    return [(SubtaskCheckpoints, "_stop_recording", stop)]


# --- barriers and channels


@bug("a channel stays blocked after the coordinator aborted", "mutant 15", seed=108)
def _():
    def abort(self, checkpoint_id):
        self._pending.pop(checkpoint_id, None)
        self._given_up.pop(checkpoint_id, None)
        if checkpoint_id > self._latest:
            self._aborted.add(checkpoint_id)

    return [(BarrierHandler, "_abort_silently", abort)]


@bug("an obsolete barrier blocks its channel", "mutant 15")
def _():
    original = BarrierHandler._begin_by_sign

    def begin(self, event, now):
        pending = original(self, event, now)
        if pending is None and type(event).__name__ == "BarrierReceived":
            self._blocked[event.channel] = event.checkpoint_id
            self._effects.append(subtask_checkpoints.BlockChannel(event.channel))
        return pending

    return [(BarrierHandler, "_begin_by_sign", begin)]


@bug("a barrier that was announced blocks its channel when it is polled", "FLINK-17994, FLINK-18063, mutant 16")
def _():
    original = BarrierHandler._consume

    def consume(self, pending, channel, now, block):
        if not block and channel in self._open and pending.collecting:
            self._blocked[channel] = pending.checkpoint_id
            self._effects.append(subtask_checkpoints.BlockChannel(channel))
        original(self, pending, channel, now, block)

    return [(BarrierHandler, "_consume", consume)]


@bug("an abort that comes before its barrier is forgotten", "FLINK-8871, mutant 21")
def _():
    def aborted(self, checkpoint_id):
        self.persisted.aborted(checkpoint_id)
        self._discard(checkpoint_id)

    return [(SubtaskCheckpoints, "aborted", aborted)]


@bug("an open snapshot goes on after its abort", "FLINK-17869, mutant 19")
def _():
    original = SubtaskCheckpoints.aborted

    def aborted(self, checkpoint_id):
        known = self._open.get(checkpoint_id)
        original(self, checkpoint_id)
        if known is not None:
            self._open[checkpoint_id] = known

    return [(SubtaskCheckpoints, "aborted", aborted)]


@bug("a snapshot waits for a barrier that has left the output queues", "76.3")
def _():
    return [(SubtaskCheckpoints, "settle_outputs", lambda self: False)]


@bug("an end of a channel is no sign for a checkpoint", "FLIP-147")
def _():
    original = BarrierHandler._on_end

    def end(self, event, now):
        pending, self._pending = self._pending, {}
        original(self, event, now)
        self._pending = pending

    return [(BarrierHandler, "_on_end", end)]


# --- bounds and references


@bug("the bound of in-flight data is ignored by the inputs", "76.1")
def _():
    return [(SubtaskCheckpoints, "_in_flight_bytes", lambda self: 0)]


@bug("the bound of in-flight data is ignored by the outputs", "76.1")
def _():
    return [(subtask_checkpoints, "_left", lambda barrier, inputs: None)]


@bug("a file of an aborted checkpoint is referred to", "76.11, FLINK-25395")
def _():
    return [(PersistedBuffers, "aborted", PersistedBuffers.completed)]


@bug("a sender sends without credit", "invariant 7")
def _():
    return [
        (SenderCredit, "available", property(lambda self: 99)),
        (SenderCredit, "spend", lambda self: None),
    ]


@bug("credit comes back for the window, not for the capacity of a local channel", "a deadlock", seed=49)
def _():
    original = LocalSubpartition.__init__

    def init(self, receiver, capacity, wake):
        window = receiver.credit.window
        original(self, receiver, capacity, wake)
        receiver.credit.window = window

    return [(LocalSubpartition, "__init__", init)]


@bug("a producer is not woken when there is room again", "a lost wake-up")
def _():
    original = RemoteSubpartition.drain_into

    def drain(self, out):
        wake, self._wake_producer = self._wake_producer, lambda: None
        original(self, out)
        self._wake_producer = wake

    return [(RemoteSubpartition, "drain_into", drain)]


# --- restore


@bug("restored data is processed after live data", "FLINK-19907, mutant 22")
def _():
    original = Subtask._work_on_rows

    def work(self):
        if self._restored is None or not self._work.is_empty or not self.gate.has_arrivals:
            return original(self)
        restored, self._restored = self._restored, None
        try:
            return original(self)
        finally:
            self._restored = restored

    return [(Subtask, "_work_on_rows", work)]


@bug("live data begins at the end of the first restored stream", "FLINK-19856, mutant 22")
def _():
    original = Subtask._read_back

    def read(self, restored):
        before = len(restored._streams)
        original(self, restored)
        if len(restored._streams) < before:
            self._restored = None

    return [(Subtask, "_read_back", read)]


@bug("restored data that is not read yet is not part of the next checkpoint", "FLINK-20654, 76.7, mutant 18")
def _():
    return [(Subtask, "unread_restored", lambda self: [])]


@bug("of restored rows in work nothing is part of the next checkpoint", "76.7", seed=90)
def _():
    original = RestoredInput.unread
    return [(RestoredInput, "unread", lambda self, edge, rest: original(self, edge, None))]


@bug("restored rows in work are whole in the next checkpoint", "FLINK-40016, mutant 18", seed=90)
def _():
    def unread(self):
        work = self._work
        batch = work._batch if work.channel is None else None
        return [] if self._restored is None else self._restored.unread(work.input_index, batch)

    return [(Subtask, "unread_restored", unread)]


@bug("restored rows are not clipped to the key groups of their new owner", "mutant 23", seed=56)
def _():
    return [(restored_input, "_clip", lambda batch, edge, own: batch)]


@bug("in-flight data of a key goes to the first new owner only", "protocols 5.3, mutant 23")
def _():
    original = assignment._origins

    def origins(partitioning, target, before, index, alive):
        if partitioning is Partitioning.HASH:
            own = key_group_range(target.max_parallelism, target.parallelism, index)
            return (owner_of_key_group(own.first, target.max_parallelism, before.parallelism),)
        return original(partitioning, target, before, index, alive)

    return [(assignment, "_origins", origins)]


@bug("in-flight data of a rebalanced channel is given to subtasks that existed before only", "mutant 23")
def _():
    original = assignment._origins

    def origins(partitioning, target, before, index, alive):
        if partitioning is Partitioning.REBALANCE:
            return (index,) if index < before.parallelism else ()
        return original(partitioning, target, before, index, alive)

    return [(assignment, "_origins", origins)]


@bug("broadcast data in flight comes from another copy than the state", "FLINK-22815", seed=58)
def _():
    original = assignment.broadcast_origin

    def origin(index, parallelism, before, alive):
        return alive[(alive.index(original(index, parallelism, before, alive)) + 1) % len(alive)]

    return [(assignment, "broadcast_origin", origin)]


@bug("output streams keep the receiver's index as their sender", "watermarks of the wrong channel, mutant 24")
def _():
    original = assignment._bundles

    def bundles(checkpoint):
        found = original(checkpoint)
        outputs = {id(s.segments): s.peer for state in checkpoint.states.values() for s in state.outputs}
        return {
            position: {
                old: [replace(s, peer=outputs.get(id(s.segments), s.peer)) for s in streams]
                for old, streams in by_old.items()
            }
            for position, by_old in found.items()
        }

    return [(assignment, "_bundles", bundles)]


@bug("watermarks of old channels count for new ones", "FLINK-40517, mutant 24")
def _():
    return [(assignment, "NO_PEER", 0)]


@bug("event time is that of the fastest input", "mutant 24")
def _():
    return [(WatermarkValve, "_least", lambda self: max((w for w in self._watermarks if w is not None), default=None))]


@bug("a final checkpoint that was triggered by its coordinator is not taken", "FLINK-23741, mutant 26")
def _():
    return [(SubtaskCheckpoints, "trigger", nothing)]


@bug("a buffer in work is given up when its first slice is done", "76.4")
def _():
    original = RowsInWork.process

    def process(self, call, *, whole=False):
        done = original(self, call, whole=whole)
        self._batch = self.channel = None
        return done or True

    return [(RowsInWork, "process", process)]


# --- storage that is away


@bug("a file that is missing counts as damaged", "one host that lost its mount failed the job for good", seed=153)
def _():
    return [(restore, "_DAMAGED", (*restore._DAMAGED, NotFoundError))]


@bug(
    "what a missing mount does not show counts as deleted",
    "directories of aborted checkpoints came back with it",
    seed=279,
)
def _():
    """It takes an outage in the moment of a deletion: there are more of them."""
    rooms = (disposal, snapshot_clean_up)
    return [(world, "OUTAGE", 0.01), *((room, "check_directory", lambda directory: None) for room in rooms)]


# --- files that checkpoints share


@bug("shared files of a recovered checkpoint are not registered", "FLINK-26985, FLINK-7268")
def _():
    return [(SharedStateRegistry, "register_all", nothing)]


@bug("what was written is the base of the next increment, notified or not", "203.11, FLINK-25395", seed=93)
def _():
    original = SharedFiles.written

    def written(self, checkpoint_id, files):
        original(self, checkpoint_id, files)
        self._base = dict(files)

    return [
        (SharedFiles, "written", written),
        (SharedFiles, "reusable", lambda self, checkpoint_id: dict(self._base)),
    ]


@bug("files go while a savepoint duplicates them", "FLIP-203", seed=37)
def _():
    return [(Retention, "pin", nothing)]


@bug("a claim deletes what sibling checkpoints need", "FLIP-193", seed=285)
def _():
    return [(JobClaims, "_needed_by_others", lambda self, *rest: set())]


@bug("a job deletes nothing of what it has claimed before its end", "203.12")
def _():
    """Its end deletes all that nobody needs by then, so the files alone do not show it."""
    return [(JobClaims, "delete", nothing), (JobClaims, "unused", lambda self, states: ())]


# --- live rescale


@bug("a job is rescaled before its fresh checkpoint is complete", "203.14")
def _():
    original = LiveChanges._on_slots_reserved

    def reserved(self, event):
        """Nothing is to be stored before that."""
        original(self, event)
        if self._change.needs_running_job and self._change.concerns(event.request_id):
            (order,) = self._change.checkpoint_taken()
            self._follow([order])
            self._tell(core.PlanStored(event.request_id))

    return [(LiveChanges, "_on_slots_reserved", reserved)]


@bug("slots that a smaller job does not need stay its own", "203.14")
def _():
    original = JobSlots._acquired

    def acquired(self, attempt, result):
        release, self._release = self._release, nothing
        original(self, attempt, result)
        self._release = release

    return [(JobSlots, "_acquired", acquired)]


@bug("slots that were reserved for a rescale that failed stay the job's", "203.14")
def _():
    return [(JobSlots, "release_reserve", nothing)]


@bug("a rescale that failed is deployed with the next restart", "203.14", seed=52)
def _():
    original = LiveChanges._give_up_change

    def give_up(self, reason):
        self._next_plan = replace(self._next_plan, graph=self.wanted_graph)
        original(self, reason)

    return [(LiveChanges, "_give_up_change", give_up)]


@bug("one vertex of a rescale keeps its parallelism", "203.14, half of it is deployed")
def _():
    original = LiveChanges._on_plan_stored

    def stored(self, event):
        wanted = self.wanted_graph
        original(self, event)
        kept = {vertex.id: vertex.parallelism for vertex in self._plan.graph.vertices[:1]}
        if self._next_plan.graph is wanted:
            self._next_plan = replace(self._next_plan, graph=wanted.with_parallelism(kept))

    return [(LiveChanges, "_on_plan_stored", stored)]


# --- the shell


@bug("what is decided is carried out in reverse", "the wiring")
def _():
    original = JobCore.handle
    return [(JobCore, "handle", lambda self, event, now: original(self, event, now)[::-1])]


@bug("workers do not hear that a checkpoint is complete", "FLIP-147, the wiring")
def _():
    return [(TaskGateway, "complete", nothing)]


@bug("a change of settings is confirmed and not in force", "571.3, the wiring")
def _():
    return [(LiveChanges, "_patch_coordinator", nothing)]


@bug("an early end of data is forgotten", "FLIP-147, the wiring", seed=116)
def _():
    original = JobCore._all_tasks_running

    def running(self, effect):
        self._at_end_of_data = []
        original(self, effect)

    return [(JobCore, "_all_tasks_running", running)]


@bug("no subtask waits for a final checkpoint", "147.3")
def _():
    return [(OperatorChain, "requires_final_checkpoint", property(lambda self: False))]


@bug("a subtask ends alone where checkpoints end with it", "147.7")
def _():
    return [(SubtaskCheckpoints, "_covers_the_end", lambda self, barrier: True)]


@bug("the end of a job is not tried again when it could not be stored", "the wiring")
def _():
    return [(JobCore, "_on_result_not_stored", nothing)]


@bug("what was uploaded while its job went is not deleted by the worker", "a cancelled job whose files stayed on S3")
def _():
    return [(NewFiles, "discard", nothing)]
