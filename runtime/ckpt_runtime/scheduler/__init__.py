"""Lifecycle and restarts of a job, PURE: no thread, socket, clock, random number, file or logger in this package.

``job_machine.JobMachine`` is one machine per job: ``handle(event, now) -> list[JobEffect]``. Its shell starts the
effects in the order given and passes ``AllTasksRunning``, ``TasksLeaveRunning``, ``StopPeriodicTrigger``,
``StartPeriodicTrigger`` and ``TriggerSavepoint`` on to the job's checkpoint coordinator, whose ``FailJob``,
``RequestCompleted`` and ``RequestFailed`` come back as ``JobFailed``, ``SavepointCompleted`` and ``SavepointFailed``.

A deployment::

    START -> AcquireSlots; SLOTS_ACQUIRED -> RestoreState; STATE_RESTORED -> Deploy
    TASK_RUNNING (last) -> AllTasksRunning

Every deployed execution ends in exactly one of TaskFinished, TaskCanceled and TaskFailed; a lost slot is a TaskFailed
for each of its executions. The shell has to kill a task that ignores CancelTasks.

Invariants of the job core:

* Run to completion: an event is processed with all that follows from it before the next one. Messages between the
  machines wait in an inner queue, and no machine is entered while it works.
* Outputs of the core are requests for I/O. The shell starts them in the order given; each that has an answer gets
  exactly one.
* One plan is in force. A replacement becomes the present plan when slots are acquired for the next deployment;
  settings of checkpoints hold at once, and overrides take precedence. A refused change changes nothing.
* An answer about an attempt counts for that attempt alone, and no attempt is deployed before its number is recorded.
* A change of the plan that is not stored changes nothing and releases what was reserved for it. Once stored it takes
  effect; its restart does not ask the restart strategy, and waits for a savepoint that a user has requested.
* A configuration change that was derived from a plan other than the present one is refused, so that no version number
  is assigned twice.
* The end of a job is reported after its result is stored; a driver that loses its lease before that reports the job as
  suspended instead.
* A new deployment begins when every subtask of the old one has ended. Messages of an older attempt change nothing.
* A stop with savepoint ends with the savepoint and a finished job, or with a failure that describes the state of both.
  After its savepoint has completed, the job is never restarted from an older checkpoint.
* A savepoint that failed before it reached a task leaves the job running. Cancelling takes precedence over everything
  else.
* A restart strategy never draws a random number: the jitter is an argument.
"""
