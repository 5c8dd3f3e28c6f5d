"""Links from a task to its job at the job manager.

The address is stored as an XCom as soon as the job is known, so that the link works while the task is deferred; a link
never reads a connection (that would need secrets in the API server).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow.sdk import BaseOperatorLink
from airflow.sdk.bases.xcom import BaseXCom

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey


class _StoredLink(BaseOperatorLink):
    """A link whose address was pushed by the operator under ``xcom_key``."""

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The address, or an empty text when the task has not come to know its job."""
        known: str | None = getattr(operator, "link_addresses", {}).get(self.xcom_key)
        return known or BaseXCom.get_value(ti_key=ti_key, key=self.xcom_key) or ""  # type: ignore[arg-type]

    def address(self, base_url: str, job_id: str) -> str:
        """The address for a job of the job manager at ``base_url``."""
        raise NotImplementedError


class CkptJobLink(_StoredLink):
    """The job itself."""

    name = "Job"

    def address(self, base_url: str, job_id: str) -> str:
        return f"{base_url}/jobs/{job_id}"


class CkptCheckpointsLink(_StoredLink):
    """The job's checkpoint history."""

    name = "Checkpoints"

    def address(self, base_url: str, job_id: str) -> str:
        return f"{base_url}/jobs/{job_id}/checkpoints"


JOB_LINKS = (CkptJobLink(), CkptCheckpointsLink())
"""What operators with a job offer."""
