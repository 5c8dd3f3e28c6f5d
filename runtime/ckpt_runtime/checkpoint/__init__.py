"""Checkpointing decisions, PURE: no thread, socket, clock, random number, file or logger anywhere in this package.

``coordinator.CheckpointCoordinator`` is one machine per job. Its shell calls ``handle(event, now) -> list[Effect]``
from one thread, starts the effects in the order given, and brings each answer back as an event at any later time.

The life of a job as its shell sees it, with events in capitals::

    coordinator = CheckpointCoordinator(job_id, graph, configuration, ids, recovered, first_delay_ms)
    RESTORE_REQUESTED(savepoint?)  -> RestoreFrom(checkpoint | None)     ... assign state, deploy
    JOB_RUNNING(executions)        -> ScheduleTimer(periodic)            ... ticks, requests, acknowledgements
    TASKS_LEFT_RUNNING             -> aborts                             ... cancel tasks, then RESTORE_REQUESTED again
    GRAPH_REPLACED(graph)          -> nothing                            ... between two deployments only
    SHUTDOWN(status)               -> ... -> ShutdownComplete

One checkpoint::

    TIMER_FIRED or TRIGGER_REQUESTED -> ScheduleTimer(canceller), InitializeLocation
    LOCATION_READY                   -> TriggerSources
    ACKNOWLEDGED (the last one)      -> CancelTimer, WriteMetadata
    METADATA_WRITTEN                 -> AddToStore                       (savepoints complete here)
    STORE_ADDED                      -> RequestCompleted, RemoveFromStore(older), NotifyComplete
    STORE_REMOVED                    -> DiscardCheckpoint
    CLEANUP_DONE

Contract for the shell:

* Each effect that names an answer gets exactly one. "Unknown" is an answer; it leads to a Resolve effect, never to a
  deletion. A write is only reported failed when it can no longer take effect.
* Messages of tasks may be lost, repeated and reordered. Names of private state files must contain the execution's
  attempt, so that discarding the files of an unknown execution deletes no other execution's files.
* A task repeats ``options.directory`` in its acknowledgement, and sends it before it reports that it has finished.
* ``TimerFired`` carries the generation it was scheduled with; firing early or late is safe.
* ``Instant.rel_ms`` never decreases. ``CheckpointIdSource`` never yields an id twice, over all drivers of the job.
* ``UnexpectedEventError`` means a bug of the shell; the machine has not changed.

Other modules: ``barrier_handler`` (one subtask's barriers), ``state_assignment`` (which subtask restores what),
``statistics`` (what REST shows), ``configuration`` (settings and their overrides), ``completed_checkpoint``
(the content of metadata).

The coordinator is made of parts. Each part owns its fields and refers only to the parts above it in this list; no part
refers to the coordinator. An effect is emitted where it is decided.

* ``ExecutionView``: the graph, attempts, which subtasks have finished.
* ``PendingCheckpoints``: pending checkpoints and aborted ids.
* ``CheckpointSchedule``: the periodic trigger, timers of ticks and of the last checkpoint; reads executions.
* ``Retention``: retained checkpoints, the registry of shared files, the cleaner, leftovers.
* ``CheckpointFailures``: the count of failures; reads pending, executions, schedule, retention.
* ``Triggering``: the queue of requests, ids, directories that are being made; reads the parts above.
* ``Completion``: writes and publishes metadata and pointers. ``Restoring``: holds the restore request until it can be
  answered.

Invariants:

* Every triggered checkpoint either completes or is aborted, at the latest at its timeout or at the end of the job.
* A deadline has a generation: a timer that was set for an older one does nothing.
* Completed ids only increase. One checkpoint is published at a time, and none while it is unknown whether the pointer
  of an earlier one was written.
* The pointer to a checkpoint is removed before its files.
* A write whose outcome is unknown is read again; it never counts as a failure.
* The savepoint of a stop gets a pointer before its completion is reported, so that no other driver undoes its
  commits.
* Leftovers of an earlier driver are deleted after this driver's first checkpoint, pointers first: until then, a restore
could still use a pointer that was written late. Shared files of a killed worker are searched for at each restart.
* In-flight data is redistributed per receiver: in-flight data of an old subtask and edge is assigned, in order, to the
  subtasks that now own its rows. A restore with in-flight data on a changed edge is refused.
* During a stop only the savepoint is triggered: in any other checkpoint the stopped sources would count as finished.
* An acknowledged state is refused if it refers to a shared file that was given up or that belongs to a user.
* While a native savepoint of an incremental job is pending, no shared file that it may use is deleted. An increment
  whose base was replaced by a full checkpoint is aborted without counting as a failure.
* Neither an unclaimed savepoint nor a file that a retained checkpoint refers to is ever deleted.
* A driver that is no longer the leader neither completes nor deletes anything.
"""
