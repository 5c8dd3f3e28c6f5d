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
"""
