"""The failures that Airflow retries: the retry policy that is the default of the operators and sensors.

It is for other tasks as well: a Python function that uses the hook fails with the client's errors, all of which Airflow
by itself would retry. Airflow does not apply a policy to an ``AirflowFailException``: it makes no retry then.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import RetryDecision, RetryPolicy

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.exceptions import CkptConflict, CkptUnavailable
from ckpt_runtime.client.errors import BadRequest, Conflict, NotServed, Unauthorized, is_passing

if TYPE_CHECKING:
    from airflow.sdk import Context


class CkptRetryPolicy(RetryPolicy):
    """Fails a task at once if the job manager has refused its request, and retries it while the session does not
    answer.

    Other failures are retried as the task is configured: a savepoint that failed, a job that failed, a session that did
    not start. The number of tries is always that of ``retries``.

    :param retry_delay: the pause before a retry while the session does not answer; default the task's own
        ``retry_delay``.
    :param retry_conflicts: also retry requests that the present state of a job forbids, such as a change during an
        upgrade. The operators have repeated a change for ``[ckpt] request_retry_timeout`` by then.
    """

    def __init__(self, *, retry_delay: timedelta | None = None, retry_conflicts: bool = False) -> None:
        self.retry_delay = retry_delay
        self.retry_conflicts = arguments.flag("retry_conflicts", retry_conflicts)

    def evaluate(
        self, exception: BaseException, try_number: int, max_tries: int, context: Context | None = None
    ) -> RetryDecision:
        """Decide on one failure; the reason is in the task's log, and for a retry on its page."""
        if isinstance(exception, CkptUnavailable) or is_passing(exception):
            return RetryDecision.retry(self.retry_delay, f"the session is unreachable: {exception}")
        if isinstance(exception, (CkptConflict, Conflict)):
            return RetryDecision.default() if self.retry_conflicts else _refused(exception)
        if isinstance(exception, (BadRequest, NotServed, Unauthorized)):
            return _refused(exception)
        return RetryDecision.default()

    def serialize(self) -> dict[str, Any]:
        """Return the arguments as JSON values."""
        delay = None if self.retry_delay is None else self.retry_delay.total_seconds()
        return {"retry_delay": delay, "retry_conflicts": self.retry_conflicts}

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> CkptRetryPolicy:
        """Return the policy with these arguments."""
        delay = data["retry_delay"]
        return cls(
            retry_delay=None if delay is None else timedelta(seconds=delay), retry_conflicts=data["retry_conflicts"]
        )


def _refused(exception: BaseException) -> RetryDecision:
    return RetryDecision.fail(f"the job manager has refused the request: {exception}")
