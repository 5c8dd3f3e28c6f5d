"""The demonstration's client of Airflow: what it repeats, and what it does not."""

from __future__ import annotations

import httpx
import pytest

from demo.airflow_api import AirflowApi, AirflowApiError

LOCKED = {"detail": {"reason": "Database error", "orig_error": "database is locked"}}
BROKEN = {"detail": {"reason": "Database error", "orig_error": "no such table: dag_run"}}


def client(*answers: httpx.Response) -> tuple[AirflowApi, list[httpx.Request]]:
    waiting = list(answers)
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return waiting.pop(0)

    return AirflowApi(httpx.Client(base_url="http://airflow", transport=httpx.MockTransport(answer))), seen


def test_a_request_is_repeated_while_the_database_is_locked() -> None:
    api, seen = client(httpx.Response(500, json=LOCKED), httpx.Response(500, json=LOCKED), httpx.Response(200, json={}))
    api.call("POST", "/dags/a/clearTaskInstances", json={"dry_run": False})
    assert [(request.method, request.content) for request in seen] == [("POST", b'{"dry_run":false}')] * 3


@pytest.mark.parametrize(("status", "body"), [(500, BROKEN), (409, LOCKED), (404, {})])
def test_other_errors_are_raised_at_once(status: int, body: dict[str, object]) -> None:
    api, seen = client(httpx.Response(status, json=body))
    with pytest.raises(AirflowApiError, match=f"GET /dags: {status}"):
        api.call("GET", "/dags")
    assert len(seen) == 1
