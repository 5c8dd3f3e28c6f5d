"""The exceptions with which tasks of this provider fail.

All are ``AirflowException``s, so Airflow retries the task, except those that a retry cannot cure: they are
``AirflowFailException``s. The retry policy in ``retry.py`` decides about the others.
"""

from __future__ import annotations

from airflow.sdk.exceptions import AirflowException, AirflowFailException

_RETURNED_NOTHING = (
    ". If it is the result of an upstream task, that task has returned nothing, for example because it was marked "
    "success or skipped: clear it, so that it runs"
)


class CkptConnectionInvalid(AirflowFailException):
    """A field of the Airflow connection has a value that cannot be used."""


class CkptArgumentInvalid(AirflowFailException, ValueError):
    """An argument of an operator or sensor has a value that cannot be used; nothing was sent."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        text = f"{name}: {value!r} is not acceptable, {allowed}"
        # A template makes text of a missing XCom.
        super().__init__(text + _RETURNED_NOTHING if value in (None, "None") else text)
        self.name = name
        self.value = value
        self.allowed = allowed


class CkptRequestRejected(AirflowFailException):
    """The job manager refused the request, or has no such call, as Flink; it would be refused again."""


class CkptNotFound(AirflowFailException):
    """The job manager has answered several times that it does not know the job, or the pipeline."""


class CkptJobNotFound(AirflowException):
    """No such job lives in the session; the message names those that do. Another job may get the name at any time."""


class CkptJobAmbiguous(AirflowFailException):
    """Several living jobs have the name that was given; the message lists them."""


class CkptJobRunning(AirflowFailException):
    """A job of the name that is to be started lives already."""


class CkptProgramChanged(AirflowFailException):
    """The job of the name runs another program than the task declares, and the task is not to change that."""


class CkptJobNotResumable(AirflowFailException):
    """The job of an earlier try has ended, its output is partly committed, and there is nothing to resume from."""


class CkptUpgradeRefused(AirflowFailException):
    """An upgrade did not begin or failed; the old job is unchanged, or keeps running. The message gives the reason."""


class CkptUpgradeRolledBack(AirflowFailException):
    """The new version did not become healthy, and the old one runs again; the message names both."""


class CkptUpgradeStranded(AirflowFailException):
    """Neither version could be started; the message names the snapshot, and what holds the programs."""


class CkptUnavailable(AirflowException):
    """The job manager could not be reached, or could not serve, for the whole of the task's retry timeout."""


class CkptOperationFailed(AirflowException):
    """A checkpoint, a savepoint or a stop ended in failure; the message is the job manager's."""


class CkptConflict(CkptOperationFailed):
    """The present state of the job forbids the request; nothing has changed."""


class CkptJobFailed(AirflowException):
    """A job ended in a state that excludes the result that the task waits for."""


class CkptSnapshotDamaged(AirflowFailException):
    """A savepoint is not complete and intact; the message names operators and files."""


class CkptTargetExists(AirflowFailException):
    """The target of a copy exists already."""


class CkptDrillFailed(AirflowFailException):
    """A savepoint could not be restored, or the restored job completed no checkpoint; the message gives the reason."""


class CkptSessionFailed(AirflowException):
    """A session's process ended, or its REST API never answered."""


class CkptWaitTimeout(AirflowException):
    """The task's own deadline passed; the message says whether the remote operation continues."""
