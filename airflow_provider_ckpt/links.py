"""Links from a task to its job, on the job manager's pages: in Airflow, or at the connection's address for browsers.

The address is stored as an XCom as soon as the job is known, so that the link works while the task is deferred; a link
never reads a connection (that would need secrets in the API server).
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from airflow.configuration import conf
from airflow.sdk import BaseOperatorLink
from airflow.sdk.bases.xcom import BaseXCom

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey


PAGES_PREFIX = "/ckpt"
"""Where the pages lie, below Airflow's own address."""


def pages_path(conn_id: str | None = None) -> str:
    """The path of a connection's pages in Airflow, or of the list of them; Airflow may be served below a path."""
    below = urlsplit(conf.get("api", "base_url", fallback="") or "").path.rstrip("/")
    return f"{below}{PAGES_PREFIX}/" + ("" if conn_id is None else f"{quote(conn_id, safe='')}/web/")


class _StoredLink(BaseOperatorLink):
    """A link whose address was pushed by the operator under ``xcom_key``."""

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The address, or an empty text when the task does not know its job."""
        known: str | None = getattr(operator, "link_addresses", {}).get(self.xcom_key)
        return known or BaseXCom.get_value(ti_key=ti_key, key=self.xcom_key) or ""  # type: ignore[arg-type]

    def address(self, pages: str, job_id: str) -> str:
        """The address of a job's page; ``pages`` is that of the pages, with a slash at its end."""
        raise NotImplementedError


class CkptJobLink(_StoredLink):
    """The job itself."""

    name = "Job"

    def address(self, pages: str, job_id: str) -> str:
        return f"{pages}#/jobs/{job_id}/health"


class CkptCheckpointsLink(_StoredLink):
    """The job's checkpoint history."""

    name = "Checkpoints"

    def address(self, pages: str, job_id: str) -> str:
        return f"{pages}#/jobs/{job_id}/checkpoints"


JOB_LINKS = (CkptJobLink(), CkptCheckpointsLink())
"""The links of operators with a job."""
