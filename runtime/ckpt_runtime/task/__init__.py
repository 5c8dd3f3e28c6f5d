"""Subtasks: loop, operator chain, checkpointing around the pure barrier handler, end of data; and their worker.

* A step never waits. A subtask takes input only when its outputs have room.
* State is frozen in the subtask's thread and written in a pool.
* A worker runs at most one deployment; messages of another are ignored. It never runs two jobs, because the modules
  that it has imported are the first job's.
* A worker runs only a plan whose fingerprint is the driver's.
* A failure of user code is reported through ``failure_report``, which never raises: a failure that cannot be reported
  would leave its job running for ever.
* A subtask whose data has ended stays until a checkpoint that covers its end has completed, unless all of its
  operators say that they need none (FLIP-147). In a stop every subtask waits for the savepoint.
* A worker ends when its agent or the driver is gone, so that no orphan writes to a sink.
* It never decides about a checkpoint: the barrier handler and the coordinator do.
"""
