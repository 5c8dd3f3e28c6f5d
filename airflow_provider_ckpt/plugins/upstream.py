"""Requests to the job manager of a connection for a page in Airflow. The token of the connection stays here.

It allows only the paths that the pages need, only GET, no redirects, and JSON answers of a bounded size.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import httpx
from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.models.connection import Connection
from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.utils.session import create_session
from sqlalchemy import select
from starlette.concurrency import run_in_threadpool

from airflow_provider_ckpt import advice
from airflow_provider_ckpt.exceptions import CkptConnectionInvalid
from airflow_provider_ckpt.hooks.ckpt import CkptHook, Endpoint, leader_of, unusable_certificates
from ckpt_runtime.client.errors import CkptClientError

MAX_ANSWER_BYTES = 16 << 20
MAX_TIMEOUT_S = 15.0
_TYPE = "ckpt"
_DEFAULT = "ckpt_default"
_ID = "[0-9a-fA-F]{32}"
_PATHS = re.compile(
    rf"overview|jobs/overview|savepoints/known|jobs/{_ID}(?:|/health|/config|/exceptions|/checkpoints|/checkpoints/config"
    rf"|/checkpoints/details/[0-9]{{1,19}}(?:/subtasks/{_ID})?|/vertices/{_ID}/backpressure)"
)
_QUERY = {"job": re.compile(_ID)}


@dataclass(frozen=True, slots=True)
class UpstreamAnswer:
    """The job manager's answer; ``content`` is JSON."""

    status: int
    content: bytes


class UpstreamRefused(Exception):
    """The job manager has given no answer that can be passed on."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def is_allowed(path: str) -> bool:
    """Whether a page of the plugin requests this path."""
    return _PATHS.fullmatch(path) is not None


def known_connections(user: BaseUser) -> list[str]:
    """Those of the type in Airflow's database and the default one, as far as the user may read them."""
    with create_session() as session:
        rows = session.execute(select(Connection.conn_id, Connection.team_name).where(Connection.conn_type == _TYPE))
        teams: dict[str, str | None] = {row.conn_id: row.team_name for row in rows}
    if _DEFAULT not in teams and _is_defined(_DEFAULT):
        teams[_DEFAULT] = None
    manager = get_auth_manager()
    return sorted(
        conn_id
        for conn_id, team in teams.items()
        if manager.filter_authorized_connections(conn_ids={conn_id}, user=user, method="GET", team_name=team)
    )


def _is_defined(conn_id: str) -> bool:
    try:
        _endpoint(conn_id)
    except UpstreamRefused as refused:
        return refused.status != 404
    return True


def _endpoint(conn_id: str) -> Endpoint:
    """Raises UpstreamRefused; with 404 for a connection of another type, whose password must not be used here."""
    try:
        connection = CkptHook.get_connection(conn_id)
    except AirflowNotFoundException:
        raise UpstreamRefused(404, f"There is no connection {conn_id!r}.") from None
    if connection.conn_type != _TYPE:
        raise UpstreamRefused(404, f"The connection {conn_id!r} is not of the type {_TYPE}.")
    try:
        return Endpoint.of(connection, connection.extra_dejson)
    except CkptConnectionInvalid as error:
        raise UpstreamRefused(502, str(error)) from None


async def asked_of(conn_id: str, path: str, query: Mapping[str, str]) -> UpstreamAnswer:
    """The answer to an allowed path. Raises UpstreamRefused."""
    endpoint = await run_in_threadpool(_endpoint, conn_id)
    wanted = {key: value for key, value in query.items() if key in _QUERY and _QUERY[key].fullmatch(value)}
    headers = {"Accept": "application/json"}
    if endpoint.token is not None:
        headers["Authorization"] = f"Bearer {endpoint.token}"
    timeout = min(endpoint.timeout, MAX_TIMEOUT_S)
    address = await _address(conn_id, endpoint)
    try:
        async with (
            # trust_env: a proxy that the environment names would see the token.
            httpx.AsyncClient(
                verify=_verification(conn_id, endpoint.verify), timeout=timeout, trust_env=False
            ) as client,
            client.stream("GET", f"{address}/{path}", params=wanted, headers=headers) as response,
        ):
            return await _checked(conn_id, response)
    except (httpx.HTTPError, OSError) as error:
        why = f"no answer within {timeout:g} s" if isinstance(error, httpx.TimeoutException) else str(error)
        text = f"The job manager of {conn_id!r} does not answer: {why or type(error).__name__}"
        raise UpstreamRefused(502, advice.on_unreachable(text, conn_id)) from None


async def _address(conn_id: str, endpoint: Endpoint) -> str:
    """The connection's address, or the one that the leader has proven. Raises UpstreamRefused."""
    if endpoint.ha_dir is None:
        return endpoint.base_url
    try:
        source = await run_in_threadpool(leader_of, conn_id, endpoint.ha_dir, endpoint.cluster_id, endpoint.token)
        return (await source.find(min(endpoint.timeout, MAX_TIMEOUT_S))).url
    except (CkptClientError, CkptConnectionInvalid) as error:
        raise UpstreamRefused(502, str(error)) from None


async def _checked(conn_id: str, response: httpx.Response) -> UpstreamAnswer:
    if response.status_code in (401, 403):
        raise UpstreamRefused(502, f"The job manager refuses the token of the connection {conn_id!r}.")
    if not response.headers.get("content-type", "").startswith("application/json") or response.is_redirect:
        raise UpstreamRefused(502, f"The server at the address of {conn_id!r} is not a job manager.")
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > MAX_ANSWER_BYTES:
            raise UpstreamRefused(502, f"The answer is larger than {MAX_ANSWER_BYTES} bytes.")
    return UpstreamAnswer(response.status_code, bytes(content))


def _verification(conn_id: str, verify: bool | str) -> ssl.SSLContext | bool:
    """Raises UpstreamRefused."""
    if verify is False:
        return False
    try:
        return _context(verify)
    except OSError as error:  # ssl's errors are of this kind
        raise UpstreamRefused(502, str(unusable_certificates(conn_id, verify, error))) from None


@lru_cache(maxsize=16)
def _context(verify: bool | str) -> ssl.SSLContext:
    """Creating the context takes longer than most answers."""
    return ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
