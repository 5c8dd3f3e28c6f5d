"""Checkpointing decisions, PURE: no thread, socket, clock, random number, file or logger anywhere in this package.

``coordinator.CheckpointCoordinator`` is one machine per job. Its shell calls ``handle(event, now) -> list[Effect]``
from one thread, starts the effects in the order given, and brings each answer back as an event at any later time.

Life of a job, shell's view (events in capitals)::

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
``statistics`` (what REST shows), ``overrides`` (FLIP-571), ``state_handles`` and ``completed_checkpoint`` (the
metadata's content).
"""
