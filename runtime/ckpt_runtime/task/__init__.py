"""Subtasks: loop, operator chain, checkpointing around the pure barrier handler, end of data; and their worker.

* A step never waits. A subtask takes input only when its outputs have room.
* State is frozen in the subtask's thread and written in a thread pool.
* A worker runs at most one deployment; messages about another one are ignored. It never runs two jobs, because the
  modules that it has imported are the first job's.
* A worker runs only a plan whose fingerprint is the driver's.
* A failure of user code is reported through ``failure_report``, which never raises: a failure that cannot be reported
  would leave its job running for ever.
* A subtask whose data has ended keeps running until a checkpoint that covers its end has completed, unless none of its
  operators requires such a checkpoint (FLIP-147). During a stop with savepoint, every subtask waits for the savepoint.
* A worker ends when its agent or the driver has ended, so that no orphaned worker writes to a sink.
* This package makes no decision about a checkpoint: the barrier handler and the coordinator do.
"""
