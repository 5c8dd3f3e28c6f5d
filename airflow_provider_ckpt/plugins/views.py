"""Pages for Airflow's DAGs, runs and tasks: the job that a task runs, and the jobs that need attention.

A task stores the id of its job as an XCom as soon as it knows it, so the page also works while the task is deferred.
Like the other pages they show only data that the user may read: the DAG, and the connection of the job.

The application also serves the files of the session's pages, and passes their requests on to the job manager that a
connection names. Airflow mounts it without any protection. Each request therefore checks in Airflow whether its user
may read the connection: a user who sees the pages sees all data that the connection's token gives access to, but never
the token. It only reads: GET, and only the paths that the pages request.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_connection, requires_access_dag
from airflow.models.connection import Connection
from airflow.models.xcom import XComModel
from airflow.utils.session import create_session
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse
from sqlalchemy import select
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from airflow_provider_ckpt.links import CkptCheckpointsLink, CkptJobLink, pages_path
from airflow_provider_ckpt.plugins.upstream import UpstreamRefused, asked_of, is_allowed, known_connections
from ckpt_runtime.contract.jobs import TERMINAL_STATES
from ckpt_runtime.web import INDEX, PageFile, page_files

_MAY_READ_DAG = Depends(requires_access_dag("GET", DagAccessEntity.XCOM))
_KEYS = ("job_id", "ckpt_conn_id")
_MOST_JOBS = 500
_MOST_ROWS = 4000
_MOST_NAMED = 5
_MOST_SECONDS = 5
_AT_A_TIME = 8
_ORDER = {"UNHEALTHY": 0, "FAILED": 0, "DEGRADED": 1}
_KINDS = {"HEALTHY": "good", "RUNNING": "good", "UNHEALTHY": "bad", "FAILED": "bad", "DEGRADED": "warn"}


@dataclass(frozen=True, slots=True)
class TaskJob:
    """A job that a task has stored; ``task`` names it as it is shown."""

    conn_id: str
    job_id: str
    task: str
    run_id: str

    @property
    def page(self) -> str:
        return CkptCheckpointsLink().address(pages_path(self.conn_id), self.job_id)

    @property
    def health_page(self) -> str:
        return CkptJobLink().address(pages_path(self.conn_id), self.job_id)


# --- the job managers of all connections


async def _connections(user: GetUserDep) -> Response:
    """The connections whose pages the user may see, with the jobs that need attention; the pages at once for one."""
    found = await run_in_threadpool(known_connections, user)
    if len(found) == 1:
        return RedirectResponse(f"{quote(found[0], safe='')}/web/", status_code=303)
    if not found:
        return _page("Job managers", "<p>There is no connection of the type ckpt that you may read.</p>")
    looks = zip(found, await _in_turn(_soon_in_trouble, found), strict=True)
    ranked = sorted(looks, key=lambda look: (not (look[1][0] or look[1][1]), look[0]))
    rows = "".join(_connection_row(conn_id, *look) for conn_id, look in ranked)
    return _page("Job managers", _table("Job managers", ("Connection", "Jobs", "Need attention"), rows), refreshes=True)


async def _soon_in_trouble(conn_id: str) -> tuple[list[dict[str, Any]], str, int]:
    """The list does not wait long for a job manager, because the others are of interest too."""
    try:
        async with asyncio.timeout(_MOST_SECONDS):
            return await _in_trouble(conn_id)
    except TimeoutError:
        return [], f"The job manager of {conn_id!r} has not answered within {_MOST_SECONDS} s.", 0


def _connection_row(conn_id: str, in_trouble: list[dict[str, Any]], problem: str, looked_at: int) -> str:
    worst = sorted(in_trouble, key=_rank)
    shown = "".join(
        f"<div><a href='{escape(job['link'])}'>{escape(job['name'])}</a> {_badge(job['verdict'] or job['state'])}"
        f"{_reasons(job)}</div>"
        for job in worst[:_MOST_NAMED]
    )
    more = f"<div>and {len(worst) - _MOST_NAMED} more</div>" if len(worst) > _MOST_NAMED else ""
    attention = shown + more or "none"
    if problem:
        attention = f"<small class='reason'>{escape(problem)}</small>"
    number = "–" if problem else str(looked_at)
    address = f'<a href="{quote(conn_id, safe="")}/web/" class="name">{escape(conn_id)}</a>'
    return f"<tr><td>{address}</td><td>{number}</td><td class='grow'>{attention}</td></tr>"


# --- the jobs of a DAG, a run or a task


async def _of_task(user: GetUserDep, dag_id: str, run_id: str, task_id: str, map_index: str) -> Response:
    """The job's own page, if the task has one. Airflow leaves the place of the index as it is for an unmapped task."""
    index = int(map_index) if map_index.isascii() and map_index.isdigit() else -1
    found = await run_in_threadpool(_stored_jobs, dag_id, run_id, task_id, index)
    if not found:
        return _page("Stream job", "<p>This task has no stream job, or does not know it yet.</p>", refreshes=True)
    if not await run_in_threadpool(_readable, user, {found[0].conn_id}):
        return _page("Stream job", f"<p>You may not read the connection {escape(found[0].conn_id)} of this job.</p>")
    return RedirectResponse(found[0].page, status_code=303)


async def _of_run(user: GetUserDep, dag_id: str, run_id: str) -> Response:
    return await _listed(user, dag_id, run_id, "No task of this run has a stream job yet.")


async def _of_dag(user: GetUserDep, dag_id: str) -> Response:
    return await _listed(user, dag_id, None, "No task of the latest runs of this DAG has a stream job.")


async def _listed(user: BaseUser, dag_id: str, run_id: str | None, nothing: str) -> Response:
    found = await run_in_threadpool(_stored_jobs, dag_id, run_id)
    readable = await run_in_threadpool(_readable, user, {job.conn_id for job in found})
    shown = [job for job in found if job.conn_id in readable]
    states = await _states_of(shown)
    ranked = sorted(zip(shown, states, strict=True), key=lambda pair: _rank(pair[1]))
    if not ranked:
        hidden = "<p>You may not read the connections of its jobs.</p>" if found else f"<p>{escape(nothing)}</p>"
        return _page("Stream jobs", hidden, refreshes=True)
    rows = "".join(_row(job, state, with_run=run_id is None) for job, state in ranked)
    columns = ("Job", "State", "Health", "Last checkpoint", "Task", *(("Run",) if run_id is None else ()))
    return _page("Stream jobs", _table("Stream jobs", columns, rows), refreshes=True)


def _table(name: str, columns: Iterable[str], rows: str) -> str:
    heads = "".join(f"<th scope='col'>{column}</th>" for column in columns)
    table = f"<table aria-label='{name}'><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<div class='scroll'>{table}</div>"


def _row(job: TaskJob, state: dict[str, Any], *, with_run: bool) -> str:
    name = f"<a href='{escape(job.page)}' class='name'>{escape(state.get('name') or job.job_id)}</a>"
    verdict = f"<a href='{escape(job.health_page)}'>{_badge(state['verdict'])}</a>" if state.get("verdict") else "–"
    age_ms = state.get("checkpoint_age_ms")
    age = "–" if age_ms is None else f"{shown_duration(age_ms)} ago"
    run = f"<td>{escape(job.run_id)}</td>" if with_run else ""
    return (
        f"<tr><td class='grow'>{name}<code class='id'>{escape(job.job_id)}</code></td><td>{_badge(state['state'])}</td>"
        f"<td>{verdict}{_reasons(state)}</td><td>{age}</td><td>{escape(job.task)}</td>{run}</tr>"
    )


def _reasons(state: dict[str, Any]) -> str:
    return "".join(f"<small class='reason'>{escape(str(text))}</small>" for text in state.get("reasons", ()))


def shown_duration(ms: int) -> str:
    """In the largest unit that has at least two of it."""
    seconds = ms // 1000
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def _badge(text: str) -> str:
    return f"<span class='badge {_KINDS.get(text, 'calm')}'>{escape(text.replace('_', ' ').lower())}</span>"


def _rank(state: dict[str, Any]) -> int:
    if state.get("replaced"):
        return 4
    return _ORDER.get(state.get("verdict") or state["state"], 3 if state["state"] in TERMINAL_STATES else 2)


async def _states_of(jobs: list[TaskJob]) -> list[dict[str, Any]]:
    """Name, state, verdict and reasons of each job; ``UNKNOWN`` where the job manager does not say."""
    conn_ids = list(dict.fromkeys(job.conn_id for job in jobs))
    looks = dict(zip(conn_ids, await _in_turn(_overview, conn_ids), strict=True))

    async def state_of(job: TaskJob) -> dict[str, Any]:
        lines, problem = looks[job.conn_id]
        line = lines.get(job.job_id)
        if line is None:
            return {"state": "UNKNOWN", "reasons": [problem or "The job manager does not know this job."]}
        found = {"name": line["name"], "state": line["state"], "replaced": line["replaced"], "reasons": []}
        return found | await _judgement(job.conn_id, line)

    return await _in_turn(state_of, jobs)


async def _overview(conn_id: str) -> tuple[dict[str, dict[str, Any]], str]:
    """The jobs of a connection by their ids, or why they are not known."""
    try:
        answer = await asked_of(conn_id, "jobs/overview", {})
    except UpstreamRefused as refused:
        return {}, str(refused)
    if answer.status != 200:
        return {}, f"The job manager of {conn_id!r} answers with {answer.status}."
    return by_id(json.loads(answer.content)["jobs"]), ""


def by_id(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The jobs of an overview by their ids, each with ``replaced``: whether a later job has its name.

    The end of a replaced job needs no attention. A restore drill replaces nothing.
    """
    latest: dict[str, int] = {}
    for line in lines:
        if not line.get("drill"):
            latest[line["name"]] = max(line["start-time"], latest.get(line["name"], 0))
    return {line["jid"]: line | {"replaced": line["start-time"] < latest.get(line["name"], 0)} for line in lines}


async def _judgement(conn_id: str, line: dict[str, Any]) -> dict[str, Any]:
    """Verdict, reasons and age of the last checkpoint; why a job has failed; nothing about other ended jobs."""
    if line["state"] not in TERMINAL_STATES:
        return await _health(conn_id, line["jid"])
    if line["state"] != "FAILED" or line["replaced"]:
        return {}
    return {"reasons": (await _health(conn_id, line["jid"])).get("reasons", [])}


async def _health(conn_id: str, job_id: str) -> dict[str, Any]:
    """Nothing where there is no verdict, as on Flink."""
    try:
        answer = await asked_of(conn_id, f"jobs/{job_id}/health", {})
    except UpstreamRefused:
        return {}
    if answer.status != 200:
        return {}
    health = json.loads(answer.content)
    age_ms = health["checkpoints"].get("last-completed-age")
    return {"verdict": health["verdict"], "reasons": health["reasons"], "checkpoint_age_ms": age_ms}


def _stored_jobs(
    dag_id: str, run_id: str | None, task_id: str | None = None, map_index: int | None = None
) -> list[TaskJob]:
    """The jobs that tasks have stored, each once, the latest first."""
    columns = (XComModel.key, XComModel.value, XComModel.run_id, XComModel.task_id, XComModel.map_index)
    query = select(*columns).where(XComModel.dag_id == dag_id, XComModel.key.in_(_KEYS))
    for column, value in ((XComModel.run_id, run_id), (XComModel.task_id, task_id), (XComModel.map_index, map_index)):
        if value is not None:
            query = query.where(column == value)
    with create_session() as session:
        rows = session.execute(query.order_by(XComModel.timestamp.desc()).limit(_MOST_ROWS)).all()
    tasks: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in rows:
        stored = tasks.setdefault((row.run_id, row.task_id, row.map_index), {})
        stored[row.key] = XComModel.deserialize_value(row)
    found: dict[tuple[str, str], TaskJob] = {}
    for (run, task, index), stored in tasks.items():
        job_id, conn_id = stored.get("job_id"), stored.get("ckpt_conn_id")
        if isinstance(job_id, str) and isinstance(conn_id, str):
            shown = task if index < 0 else f"{task} [{index}]"
            found.setdefault((conn_id, job_id), TaskJob(conn_id, job_id, shown, run))
    return list(found.values())[:_MOST_JOBS]


def _readable(user: BaseUser, conn_ids: Collection[str]) -> set[str]:
    """Those of the connections that the user may read."""
    with create_session() as session:
        query = select(Connection.conn_id, Connection.team_name).where(Connection.conn_id.in_(conn_ids))
        teams: dict[str, str | None] = {row.conn_id: row.team_name for row in session.execute(query)}
    manager = get_auth_manager()
    return {
        conn_id
        for conn_id in conn_ids
        if manager.filter_authorized_connections(
            conn_ids={conn_id}, user=user, method="GET", team_name=teams.get(conn_id)
        )
    }


def _page(title: str, body: str, *, refreshes: bool = False) -> Response:
    base = escape(pages_path())
    refresh = f'<script type="module" src="{base}refresh.js"></script>' if refreshes else ""
    text = (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>{refresh}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="stylesheet" href="{base}style.css"><script type="module" src="{base}theme.js"></script></head>'
        f"<body><main><h1>{escape(title)}</h1>{body}</main></body></html>"
    )
    page = PageFile(text.encode(), "text/html; charset=utf-8", '""')
    return Response(page.content, headers=page.headers(may_be_framed=True) | {"Cache-Control": "no-store"})


async def _static(request: Request) -> Response:
    """A file that a page loads: one of the job manager's pages, or of these."""
    name = request.url.path.rpartition("/")[2]
    shared = page_files().get(name)
    file = _own_file(name) if shared is None else shared
    return Response(file.content, headers=file.headers(may_be_framed=shared is not None))


@cache
def _own_file(name: str) -> PageFile:
    content = files("airflow_provider_ckpt.plugins").joinpath("static", name).read_bytes()
    media_type = page_files()["theme.js"].media_type
    return PageFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


# --- the card on the home page


async def _trouble(user: GetUserDep) -> Response:
    """The living jobs that are not healthy and those that have failed, of all connections that the user may read."""
    conn_ids = await run_in_threadpool(known_connections, user)
    looks = await _in_turn(_in_trouble, conn_ids)
    # Several connections may lead to one session.
    each_once = {job["job_id"]: job for found, _, _ in reversed(looks) for job in found}
    jobs = sorted(each_once.values(), key=_rank)
    unread = [problem for _, problem, _ in looks if problem]
    counted = sum(number for _, _, number in looks)
    answer = {"jobs": jobs, "unread": unread, "looked_at": counted, "connections": len(conn_ids)}
    return JSONResponse(answer, headers={"Cache-Control": "no-store"})


async def _in_trouble(conn_id: str) -> tuple[list[dict[str, Any]], str, int]:
    """The jobs of a connection that need attention, or why they are not known; and how many jobs were looked at.

    A job that has failed needs attention until a later job has its name.
    """
    lines, problem = await _overview(conn_id)
    looked_at = [
        line
        for line in lines.values()
        if line["state"] not in TERMINAL_STATES or (line["state"] == "FAILED" and not line["replaced"])
    ]

    async def judged(line: dict[str, Any]) -> dict[str, Any]:
        found = {"name": line["name"], "job_id": line["jid"], "state": line["state"], "verdict": None, "reasons": []}
        found["link"] = CkptJobLink().address(pages_path(conn_id), line["jid"])
        return found | await _judgement(conn_id, line)

    judgements = await _in_turn(judged, looked_at)
    in_trouble = [job for job in judgements if job["state"] == "FAILED" or job["verdict"] in ("DEGRADED", "UNHEALTHY")]
    return in_trouble, problem, len(looked_at)


async def _in_turn(ask: Any, items: Iterable[Any]) -> list[Any]:
    """The answers in the order of the items; at most eight are requested at a time."""
    free = asyncio.Semaphore(_AT_A_TIME)

    async def one(item: Any) -> Any:
        async with free:
            return await ask(item)

    return list(await asyncio.gather(*(one(item) for item in items)))


_MAY_READ = Depends(requires_access_connection("GET"))
_ROOT = "/{connection_id}"


@cache
def application() -> FastAPI:
    """The application of this process."""
    app = FastAPI(title="ckpt", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for name in ("style.css", "theme.js", "dashboard.js", "refresh.js"):
        app.add_api_route(f"/{name}", _static, methods=["GET"])
    may_read = [_MAY_READ_DAG]
    app.add_api_route("/", _connections, methods=["GET"])
    app.add_api_route("/trouble", _trouble, methods=["GET"])
    app.add_api_route("/of/{dag_id}", _of_dag, methods=["GET"], dependencies=may_read)
    app.add_api_route("/of/{dag_id}/{run_id}", _of_run, methods=["GET"], dependencies=may_read)
    app.add_api_route("/of/{dag_id}/{run_id}/{task_id}/{map_index}", _of_task, methods=["GET"], dependencies=may_read)
    app.add_api_route(f"{_ROOT}/web/", _serve_page, methods=["GET"], dependencies=[_MAY_READ])
    app.add_api_route(f"{_ROOT}/web/session", _session, methods=["GET"], dependencies=[_MAY_READ])
    app.add_api_route(f"{_ROOT}/web/{{name}}", _serve_page, methods=["GET"], dependencies=[_MAY_READ])
    app.add_api_route(f"{_ROOT}/{{path:path}}", _through, methods=["GET"], dependencies=[_MAY_READ])
    return app


async def _serve_page(request: Request, name: str = INDEX) -> Response:
    file = page_files().get(name)
    if file is None:
        return _refusal(404, "There is no such page.")
    headers = file.headers(may_be_framed=True)
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers)


async def _session() -> dict[str, bool]:
    """The login is Airflow's own."""
    return {"login": False}


async def _through(request: Request, connection_id: str, path: str) -> Response:
    """The answer of the job manager to the same path."""
    if not is_allowed(path):
        return _refusal(404, "The pages do not request this path.")
    try:
        answer = await asked_of(connection_id, path, dict(request.query_params))
    except UpstreamRefused as refused:
        return _refusal(refused.status, str(refused))
    headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
    return Response(answer.content, answer.status, headers, media_type="application/json")


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"errors": [message]}, status_code=status)
