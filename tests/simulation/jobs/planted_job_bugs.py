"""Bugs to plant in what the simulation of whole jobs runs, each a small patch, most after what other engines met.

Each has to be found within ``ENOUGH`` seeds; one that is not is a defect of the simulator.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial

from ckpt_runtime.checkpoint import barrier_handler as barriers
from ckpt_runtime.checkpoint import channel_state_assignment as assignment
from ckpt_runtime.checkpoint.barrier_handler import BarrierHandler
from ckpt_runtime.checkpoint.completed_checkpoint import SharedStateRegistry
from ckpt_runtime.checkpoint.retention import Retention
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.graph.key_groups import key_group_range, owner_of_key_group
from ckpt_runtime.jobmaster.job_host import JobSlots
from ckpt_runtime.jobmaster.task_gateway import TaskGateway
from ckpt_runtime.network.elements import CheckpointBarrier, SenderCredit, Watermark
from ckpt_runtime.network.gate import InputChannel
from ckpt_runtime.network.output_queue import EncodedRows, OutputQueue
from ckpt_runtime.network.remote_subpartition import RemoteSubpartition
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler.job_core import JobCore
from ckpt_runtime.snapshots import clean_up
from ckpt_runtime.snapshots.job_claims import JobClaims
from ckpt_runtime.state.shared_files import SharedFiles
from ckpt_runtime.storage import checkpoint_storage
from ckpt_runtime.storage.errors import NotFoundError
from ckpt_runtime.task import restored_input, snapshot_files, subtask_checkpoints
from ckpt_runtime.task.chain import OperatorChain
from ckpt_runtime.task.in_flight import PersistedBuffers
from ckpt_runtime.task.output import CurrentBuffer, LocalSubpartition, ResultPartition
from ckpt_runtime.task.restored_input import RestoredInput
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
        "an open snapshot continues after its abort",
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


@bug("a barrier overtakes an aligned barrier", "76.8, protocols 3.6", OutputQueue, "_place", seed=2)
def _(original, self, queued, barrier, end, limit):
    parked = [element for element in queued[:end] if isinstance(element, CheckpointBarrier)]
    rest = [element for element in queued[:end] if not isinstance(element, CheckpointBarrier)]
    overtaken = original(self, [*rest, *queued[end:]], barrier, len(rest), limit)
    now = list(self._queue)
    at = next(place for place, element in enumerate(now) if element is barrier)
    self._queue = deque([*now[: at + 1], *parked, *now[at + 1 :]])
    return overtaken


@bug(
    "a barrier moved to the front is left in its old place as well",
    "the deadline of the aligned timeout, twice",
    OutputQueue,
    "switch_to_unaligned",
)
def _(self, checkpoint_id, limit=None):
    queued = list(self._queue)
    for position, element in enumerate(queued):
        if isinstance(element, CheckpointBarrier) and element.checkpoint_id == checkpoint_id:
            return self._place(queued, element, position, limit)
    return []


bug("what a barrier overtakes in a queue is not kept", "76.2", OutputQueue, "add_barrier")(
    lambda original, self, *rest: original(self, *rest)[:0]
)

bug("what a barrier overtakes when it turns at the deadline is not kept", "76.3", OutputQueue, "switch_to_unaligned")(
    lambda original, self, *rest: original(self, *rest)[:0]
)


@bug(
    "the barrier is put in front of data that is not kept as the bound is reached",
    "76.1",
    OutputQueue,
    "_place",
    seed=14,
)
def _(original, self, queued, barrier, end, limit):
    overtaken = original(self, queued, barrier, end, None)
    size = 0
    kept = []
    for element in reversed(overtaken):
        size += element.message.size if isinstance(element, EncodedRows) else 0
        if limit is not None and size > limit:
            break
        kept.insert(0, element)
    return kept


bug(
    "barriers overtake on edges where they must stay in order", "FLINK-33693, mutant 20", ResultPartition, "_overtakes"
)(property(lambda self: True, lambda self, value: None))


@bug("watermarks in an output queue are not kept", "76.2", OutputQueue, "_place")
def _(original, self, *rest):
    return [element for element in original(self, *rest) if not isinstance(element, Watermark)]


# --- what is recorded of the inputs


bug("the rest of the batch in work is not recorded", "76.2, mutant 17", Subtask, "rest_of_buffer", seed=3)(nothing)


@bug("the whole batch in work is recorded", "rows twice, FLINK-40016", Subtask, "rest_of_buffer", seed=3)
def _(self):
    batch = self._work._batch
    return None if batch is None or self._work.channel is None else (self._work.channel, batch)


@bug(
    "what stands before an announced barrier is recorded twice",
    "76.2, mutant 18",
    SubtaskCheckpoints,
    "_stop_recording",
    seed=54,
)
def _(original, self, checkpoint_id, index, ended):
    original(self, checkpoint_id, index, ended)
    if checkpoint_id in self._open:
        self._open[checkpoint_id].recording.add(index)
        self.records = True


bug(
    "what stands before an announced barrier is not recorded",
    "76.2, FLINK-20645",
    SubtaskCheckpoints,
    "_stop_recording",
)(lambda self, checkpoint_id, index, ended: None)


@bug("recording is for the newest checkpoint only", "FLINK-20645, mutant 17", SubtaskCheckpoints, "record")
def _(self, channel, element):
    if self._open:
        snapshot = self._open[max(self._open)]
        if channel.index in snapshot.recording:
            snapshot.inputs[channel.index].elements.append(element)


@bug("watermarks in an input channel are not recorded", "76.2", InputChannel, "queued_before")
def _(original, self, checkpoint_id, *, or_all=False):
    found = original(self, checkpoint_id, or_all=or_all)
    return [element for element in found if not isinstance(element, Watermark)]


@bug(
    "all rows of a channel are stored with the schema of the first",
    "rows read as others",
    snapshot_files,
    "_streams",
    seed=3,
)
def _(original, channel, persisted, checkpoint_id):
    parts = original(channel, persisted, checkpoint_id)
    first, _ = parts[0]
    stored = [element for stream, _ in parts for element in stream.elements]
    return [(replace(first, elements=stored), [element for _, more in parts for element in more])]


@bug("a change of the schema is not sent", "rows read as others", RemoteSubpartition, "_append_rows", seed=2)
def _(original, self, rows, out):
    original(self, rows if self._sent_schema is None else replace(rows, schema=self._sent_schema), out)


@bug(
    "a channel that waits has the latest schema for all of its rows",
    "rows read as others",
    Subtask,
    "_process",
    seed=12,
)
def _(original, self, channel, element):
    changed = isinstance(element, EncodedRows) and channel.schema is not None
    original(self, channel, replace(element, schema=channel.schema) if changed else element)


# --- barriers and channels


@bug("a channel stays blocked after the coordinator aborted", "mutant 15", BarrierHandler, "_abort_silently", seed=105)
def _(self, checkpoint_id):
    self._pending.pop(checkpoint_id, None)
    self._given_up.pop(checkpoint_id, None)
    if checkpoint_id > self._latest:
        self._aborted.add(checkpoint_id)


@bug("an obsolete barrier blocks its channel", "mutant 15", BarrierHandler, "_begin_by_sign", seed=14)
def _(original, self, event, now):
    pending = original(self, event, now)
    if pending is None and type(event).__name__ == "BarrierReceived":
        self._blocked[event.channel] = event.checkpoint_id
        self._effects.append(barriers.BlockChannel(event.channel))
    return pending


@bug(
    "a barrier that was announced blocks its channel when it is polled",
    "FLINK-17994, FLINK-18063, mutant 16",
    BarrierHandler,
    "_consume",
    seed=16,
)
def _(original, self, pending, channel, now, block):
    if not block and channel in self._open and pending.collecting:
        self._blocked[channel] = pending.checkpoint_id
        self._effects.append(barriers.BlockChannel(channel))
    original(self, pending, channel, now, block)


@bug(
    "an abort that comes before its barrier is forgotten",
    "FLINK-8871, mutant 21",
    SubtaskCheckpoints,
    "aborted",
    seed=5,
)
def _(self, checkpoint_id):
    self.persisted.aborted(checkpoint_id)
    self._discard(checkpoint_id)


@bug("an open snapshot continues after its abort", "FLINK-17869, mutant 19", SubtaskCheckpoints, "aborted")
def _(original, self, checkpoint_id):
    known = self._open.get(checkpoint_id)
    original(self, checkpoint_id)
    if known is not None:
        self._open[checkpoint_id] = known


bug("a snapshot waits for a barrier that has left the output queues", "76.3", SubtaskCheckpoints, "settle_outputs")(
    lambda self: False
)


@bug("an end of a channel is no sign for a checkpoint", "FLIP-147", BarrierHandler, "_on_end")
def _(original, self, event, now):
    pending, self._pending = self._pending, {}
    original(self, event, now)
    self._pending = pending


# --- bounds and references


bug("the bound of in-flight data is ignored by the inputs", "76.1", SubtaskCheckpoints, "_in_flight_bytes", seed=14)(
    lambda self: 0
)

bug("the bound of in-flight data is ignored by the outputs", "76.1", subtask_checkpoints, "_left", seed=14)(
    lambda barrier, inputs: None
)

bug("a file of an aborted checkpoint is referred to", "76.11, FLINK-25395", PersistedBuffers, "aborted")(
    PersistedBuffers.completed
)


@bug("a sender sends without credit", "invariant 7", seed=3)
def _():
    return [
        (SenderCredit, "available", property(lambda self: 99)),
        (SenderCredit, "spend", lambda self: None),
    ]


@bug(
    "credit comes back for the window, not for the capacity of a local channel",
    "a deadlock",
    LocalSubpartition,
    "__init__",
    seed=49,
)
def _(original, self, receiver, capacity, wake):
    window = receiver.credit.window
    original(self, receiver, capacity, wake)
    receiver.credit.window = window


@bug("a producer is not woken when there is room again", "a lost wake-up", RemoteSubpartition, "drain_into")
def _(original, self, out):
    wake, self._wake_producer = self._wake_producer, lambda: None
    original(self, out)
    self._wake_producer = wake


# --- restore


@bug("restored data is processed after live data", "FLINK-19907, mutant 22", Subtask, "_work_on_rows", seed=2)
def _(original, self):
    if self._restored is None or not self._work.is_empty or not self.gate.has_arrivals:
        return original(self)
    restored, self._restored = self._restored, None
    try:
        return original(self)
    finally:
        self._restored = restored


@bug(
    "live data begins at the end of the first restored stream", "FLINK-19856, mutant 22", Subtask, "_read_back", seed=2
)
def _(original, self, restored):
    before = len(restored._streams)
    original(self, restored)
    if len(restored._streams) < before:
        self._restored = None


bug(
    "restored data that is not read yet is not part of the next checkpoint",
    "FLINK-20654, 76.7, mutant 18",
    Subtask,
    "unread_restored",
    seed=18,
)(lambda self: [])

bug("of restored rows in work nothing is part of the next checkpoint", "76.7", RestoredInput, "unread", seed=130)(
    lambda original, self, edge, rest: original(self, edge, None)
)


@bug(
    "restored rows in work are whole in the next checkpoint",
    "FLINK-40016, mutant 18",
    Subtask,
    "unread_restored",
    seed=130,
)
def _(self):
    work = self._work
    batch = work._batch if work.channel is None else None
    return [] if self._restored is None else self._restored.unread(work.input_index, batch)


bug(
    "restored rows are not clipped to the key groups of their new owner", "mutant 23", restored_input, "_clip", seed=86
)(lambda batch, edge, own: batch)


@bug("in-flight data of a key goes to the first new owner only", "protocols 5.3, mutant 23", assignment, "_origins")
def _(original, partitioning, target, before, index, alive):
    if partitioning is Partitioning.HASH:
        own = key_group_range(target.max_parallelism, target.parallelism, index)
        return (owner_of_key_group(own.first, target.max_parallelism, before.parallelism),)
    return original(partitioning, target, before, index, alive)


@bug(
    "in-flight data of a rebalanced channel is given to subtasks that existed before only",
    "mutant 23",
    assignment,
    "_origins",
)
def _(original, partitioning, target, before, index, alive):
    if partitioning is Partitioning.REBALANCE:
        return (index,) if index < before.parallelism else ()
    return original(partitioning, target, before, index, alive)


@bug(
    "broadcast data in flight comes from another copy than the state",
    "FLINK-22815",
    assignment,
    "broadcast_origin",
    seed=58,
)
def _(original, index, parallelism, before, alive):
    return alive[(alive.index(original(index, parallelism, before, alive)) + 1) % len(alive)]


@bug(
    "output streams keep the receiver's index as their sender",
    "watermarks of the wrong channel, mutant 24",
    assignment,
    "_bundles",
)
def _(original, checkpoint):
    found = original(checkpoint)
    outputs = {id(s.segments): s.peer for state in checkpoint.states.values() for s in state.outputs}
    return {
        position: {
            old: [replace(s, peer=outputs.get(id(s.segments), s.peer)) for s in streams]
            for old, streams in by_old.items()
        }
        for position, by_old in found.items()
    }


bug("watermarks of old channels count for new ones", "FLINK-40517, mutant 24", assignment, "NO_PEER")(0)

bug("event time is that of the fastest input", "mutant 24", WatermarkValve, "_of_all", seed=16)(
    lambda _, active: max((known for known in active if known is not None), default=None)
)

bug(
    "a final checkpoint that was triggered by its coordinator is not taken",
    "FLINK-23741, mutant 26",
    SubtaskCheckpoints,
    "trigger",
)(nothing)


@bug("a buffer in work is given up when its first slice is done", "76.4", CurrentBuffer, "process", seed=3)
def _(original, self, call, *, whole=False):
    done = original(self, call, whole=whole)
    self._batch = self.channel = None
    return done or True


# --- storage that is away


bug(
    "a file that is missing counts as damaged",
    "one host that lost its mount failed the job for good",
    restored_input,
    "_DAMAGED",
    seed=173,
)((*restored_input._DAMAGED, NotFoundError))


@bug(
    "what a missing mount does not show counts as deleted",
    "directories of aborted checkpoints came back with it",
    seed=845,
)
def _():
    """It takes an outage in the moment of a deletion: there are more of them."""
    rooms = (checkpoint_storage, clean_up)
    return [(world, "OUTAGE", 0.01), *((room, "check_directory", lambda directory: None) for room in rooms)]


# --- files that checkpoints share


bug(
    "shared files of a recovered checkpoint are not registered",
    "FLINK-26985, FLINK-7268",
    SharedStateRegistry,
    "register_all",
    seed=2,
)(nothing)


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


bug("files go while a savepoint duplicates them", "FLIP-203", Retention, "pin", seed=177)(nothing)

bug("a claim deletes what sibling checkpoints need", "FLIP-193", JobClaims, "_needed_by_others", seed=630)(
    lambda self, *rest: set()
)


@bug("a job deletes nothing of what it has claimed before its end", "203.12", seed=2)
def _():
    """The end of a job deletes everything that is unneeded by then, so the files alone do not show the bug."""
    return [(JobClaims, "delete", nothing), (JobClaims, "unused", lambda self, states: ())]


# --- live rescale


@bug("a job is rescaled before its fresh checkpoint is complete", "203.14", JobCore, "_on_slots_reserved", seed=33)
def _(original, self, event):
    """Nothing is to be stored before that."""
    original(self, event)
    if self._change.needs_running_job and self._change.concerns(event.request_id):
        (order,) = self._change.checkpoint_taken()
        self._follow([order])
        self._tell(core.PlanStored(event.request_id))


@bug("slots that a smaller job does not need stay its own", "203.14", JobSlots, "_acquired", seed=3)
def _(original, self, attempt, result):
    release, self._release = self._release, nothing
    original(self, attempt, result)
    self._release = release


bug(
    "slots that were reserved for a rescale that failed stay the job's", "203.14", JobSlots, "release_reserve", seed=32
)(nothing)


@bug("a rescale that failed is deployed with the next restart", "203.14", JobCore, "_give_up_change", seed=52)
def _(original, self, reason):
    self.accepted_plan = replace(self.accepted_plan, graph=self.target_graph)
    original(self, reason)


@bug(
    "one vertex of a rescale keeps its parallelism",
    "203.14, half of it is deployed",
    JobCore,
    "_on_plan_stored",
    seed=6,
)
def _(original, self, event):
    wanted = self.target_graph
    original(self, event)
    kept = {vertex.id: vertex.parallelism for vertex in self.plan.graph.vertices[:1]}
    if self.accepted_plan.graph is wanted:
        self.accepted_plan = replace(self.accepted_plan, graph=wanted.with_parallelism(kept))


# --- the shell


bug("what is decided is carried out in reverse", "the wiring", JobCore, "handle")(
    lambda original, self, event, now: original(self, event, now)[::-1]
)

bug("workers do not hear that a checkpoint is complete", "FLIP-147, the wiring", TaskGateway, "complete")(nothing)

bug("a change of settings is confirmed and not in force", "571.3, the wiring", JobCore, "_patch_coordinator")(nothing)


@bug("an early end of data is forgotten", "FLIP-147, the wiring", JobCore, "_all_tasks_running", seed=124)
def _(original, self, effect):
    self._at_end_of_data = []
    original(self, effect)


bug("no subtask waits for a final checkpoint", "147.3", OperatorChain, "requires_final_checkpoint")(
    property(lambda self: False)
)

bug("a subtask ends alone where checkpoints end with it", "147.7", SubtaskCheckpoints, "_covers_the_end", seed=3)(
    lambda self, barrier: True
)

bug(
    "the end of a job is not tried again when it could not be stored",
    "the wiring",
    JobCore,
    "_on_result_not_stored",
    seed=5,
)(nothing)

bug(
    "what was uploaded while its job went is not deleted by the worker",
    "a cancelled job whose files stayed on S3",
    NewFiles,
    "discard",
    seed=5,
)(nothing)
