"""The few calls of Airflow's public REST API (``/api/v2``) that the demonstration and the system tests need.

It never starts or stops a process. Callers own the waiting; a request is repeated only when SQLite was locked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import quote

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

LOCKED_RETRY_SECONDS: Final = 60.0


class AirflowApiError(RuntimeError):
    """Airflow could not be reached, or answered with an error status."""


class DatabaseLockedError(AirflowApiError):
    """SQLite gave up waiting for another writer; the transaction was rolled back, nothing has changed."""


@dataclass(frozen=True, slots=True)
class DagRun:
    """Names one run of one DAG."""

    dag_id: str
    run_id: str

    @property
    def path(self) -> str:
        """The run's resource below ``/api/v2``."""
        return f"/dags/{quote(self.dag_id)}/dagRuns/{quote(self.run_id, safe='')}"


class AirflowApi:
    """An authenticated client; one per thread."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    @classmethod
    def connect(cls, base_url: str, timeout: float = 60.0) -> Self:
        """Get a token from an Airflow in which every user is an administrator, and return a client that uses it.

        :raises AirflowApiError: when the server is not reachable yet.
        """
        try:
            answer = httpx.get(f"{base_url}/auth/token", timeout=timeout)
            answer.raise_for_status()
            token = answer.json()["access_token"]
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise AirflowApiError(f"no token from {base_url}: {error}") from error
        headers = {"Authorization": f"Bearer {token}"}
        return cls(httpx.Client(base_url=f"{base_url}/api/v2", headers=headers, timeout=timeout))

    def close(self) -> None:
        self._client.close()

    def call(self, method: str, path: str, json: Any = None, params: dict[str, Any] | None = None) -> Any:
        """One request below ``/api/v2``; returns the decoded JSON body, or ``None`` for an empty one.

        :raises AirflowApiError: for a transport error or a status >= 400, with the answer's text.
        """
        attempts = Retrying(
            retry=retry_if_exception_type(DatabaseLockedError),
            stop=stop_after_delay(LOCKED_RETRY_SECONDS),
            wait=wait_fixed(0.2),
            reraise=True,
        )
        return attempts(self._call_once, method, path, json, params)

    def _call_once(self, method: str, path: str, json: Any, params: dict[str, Any] | None) -> Any:
        try:
            answer = self._client.request(method, path, json=json, params=params)
        except httpx.HTTPError as error:
            raise AirflowApiError(f"{method} {path}: {error!r}") from error
        if answer.status_code >= 400:
            locked = answer.status_code == 500 and "database is locked" in answer.text
            kind = DatabaseLockedError if locked else AirflowApiError
            raise kind(f"{method} {path}: {answer.status_code} {answer.text[:2000]}")
        return answer.json() if answer.content else None

    def health(self) -> dict[str, Any]:
        """Component -> status document."""
        return dict(self.call("GET", "/monitor/health"))

    def has_dag(self, dag_id: str) -> bool:
        """Whether the DAG processor has stored this DAG."""
        found = self.call("GET", "/dags", params={"dag_id_pattern": dag_id, "limit": 100})
        return any(dag["dag_id"] == dag_id for dag in found["dags"])

    def import_errors(self) -> list[str]:
        """One text per DAG file that could not be imported."""
        found = self.call("GET", "/importErrors")
        return [f"{error['filename']}: {error['stack_trace']}" for error in found["import_errors"]]

    def unpause(self, dag_id: str) -> None:
        """Let the scheduler run this DAG."""
        self.call("PATCH", f"/dags/{quote(dag_id)}", json={"is_paused": False})

    def parse_again(self, dag_id: str) -> None:
        """Have the DAG's file read at once; assets get their watchers when a DAG that is not paused is read."""
        token = self.call("GET", f"/dags/{quote(dag_id)}/details")["file_token"]
        self.call("PUT", f"/parseDagFile/{quote(token)}")

    def trigger(self, dag_id: str, conf: dict[str, Any]) -> DagRun:
        """Start a run with these parameters."""
        body = {"logical_date": None, "conf": conf}
        answer = self.call("POST", f"/dags/{quote(dag_id)}/dagRuns", json=body)
        return DagRun(dag_id, answer["dag_run_id"])

    def run_state(self, run: DagRun) -> str:
        """``queued``, ``running``, ``success`` or ``failed``."""
        return str(self.call("GET", run.path)["state"])

    def task_instances(self, run: DagRun) -> list[dict[str, Any]]:
        """All task instances of a run as Airflow describes them."""
        return list(self.call("GET", f"{run.path}/taskInstances", params={"limit": 1000})["task_instances"])

    def task_states(self, run: DagRun) -> dict[str, str | None]:
        """Task id (``id[index]`` for a mapped task) -> state."""
        states: dict[str, str | None] = {}
        for instance in self.task_instances(run):
            index = instance.get("map_index", -1)
            states[instance["task_id"] if index < 0 else f"{instance['task_id']}[{index}]"] = instance["state"]
        return states

    def set_task_state(self, run: DagRun, task_id: str, state: str) -> None:
        """The action of "mark failed" and "mark success" in the user interface."""
        self.call("PATCH", f"{run.path}/taskInstances/{quote(task_id)}", json={"new_state": state})

    def clear_task(self, run: DagRun, task_id: str) -> None:
        """The action of "clear" in the user interface, for one task."""
        body = {"dry_run": False, "dag_run_id": run.run_id, "task_ids": [task_id], "only_failed": False}
        self.call("POST", f"/dags/{quote(run.dag_id)}/clearTaskInstances", json=body)

    def xcom(self, run: DagRun, task_id: str, key: str = "return_value") -> Any:
        """A value that a task pushed.

        :raises AirflowApiError: when there is none.
        """
        path = f"{run.path}/taskInstances/{quote(task_id)}/xcomEntries/{quote(key)}"
        return self.call("GET", path, params={"deserialize": False})["value"]

    def task_log(self, run: DagRun, task_id: str, try_number: int = 1) -> str:
        """The log of one try as lines of text; structured entries become ``level event``."""
        answer = self.call("GET", f"{run.path}/taskInstances/{quote(task_id)}/logs/{try_number}")
        lines = []
        for entry in answer["content"]:
            if isinstance(entry, str):
                lines.append(entry)
                continue
            details = entry.get("error_detail")
            reasons = [f"{item['exc_type']}: {item['exc_value']}" for item in details] if details else []
            lines.append(" ".join([str(entry.get("level", "")), str(entry.get("event", "")), *reasons]).strip())
        return "\n".join(lines)
