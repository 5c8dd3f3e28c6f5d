"""The hook: from an Airflow connection to a REST client, synchronous for workers and asynchronous for triggers.

The fields of the connection are checked before they are used. The hook adds nothing to the client, which defines which
requests the job manager takes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException

from airflow_provider_ckpt import advice
from airflow_provider_ckpt.exceptions import CkptConnectionInvalid
from ckpt_runtime.client.clients import AsyncCkptClient, CkptClient
from ckpt_runtime.client.errors import CkptClientError, NotFound
from ckpt_runtime.client.transport import InvalidToken, LeaderSource, check_token
from ckpt_runtime.client.waiting import DEFAULT_RETRY_TIMEOUT_S
from ckpt_runtime.contract.checkpoints import Savepoint
from ckpt_runtime.secret_keys import without_credentials


class CkptHook(BaseHook):
    """Connects to a job manager, or to a Flink cluster.

    The connection's fields: host, port (8081), scheme (``http`` or ``https``), password (bearer token); extra:
    ``verify``, ``ca_file``, ``timeout`` (seconds for one request). Or, in place of the host, extra ``ha_dir`` and
    ``ha_cluster_id``: the job manager that leads is found there, and followed when another one takes over.

    :param ckpt_conn_id: the Airflow connection.
    """

    conn_name_attr = "ckpt_conn_id"
    default_conn_name = "ckpt_default"
    conn_type = "ckpt"
    hook_name = "Checkpoint runtime (ckpt, Flink REST)"

    def __init__(self, ckpt_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ckpt_conn_id = ckpt_conn_id

    def endpoint(self) -> Endpoint:
        """Read the address and manners that the connection names.

        :raises CkptConnectionInvalid: for a field that cannot be used.
        """
        connection = self.get_connection(self.ckpt_conn_id)
        return Endpoint.of(connection, connection.extra_dejson)

    async def aendpoint(self) -> Endpoint:
        """As :meth:`endpoint`, inside an event loop."""
        connection = await self.aget_connection(self.ckpt_conn_id)
        return Endpoint.of(connection, await connection.aextra_dejson())

    def get_conn(
        self,
        *,
        retry_timeout: float = DEFAULT_RETRY_TIMEOUT_S,
        on_away: Callable[[CkptClientError], None] | None = None,
        endpoint: Endpoint | None = None,
    ) -> CkptClient:
        """Make a new synchronous client; use it as a context manager.

        When the job manager refuses the token, the connection is read once more: a session that has restarted may have
        another token, and the connection may have it by then.

        :param retry_timeout: how many seconds it repeats a request while the job manager is away.
        :param on_away: is called each time.
        :param endpoint: the connection as it was read before; it is not read again.
        :raises CkptConnectionInvalid: for a field that cannot be used
        """
        known = endpoint or self.endpoint()
        address = self._address(known)
        with self._certificates_named(known):
            client = CkptClient(address, **_client_arguments(known, retry_timeout), on_away=on_away)
        if endpoint is None:
            client.calls.renew_token = lambda: self._token_instead(known)
        return client

    def _token_instead(self, refused: Endpoint) -> str | None:
        """Return the connection's current token, if it still leads to the same place."""
        now = self.endpoint()
        if now.token == refused.token or replace(now, token=refused.token) != refused:
            return None
        self.log.info("The token was refused; the connection %r now has another one", self.ckpt_conn_id)
        return now.token

    async def aget_conn(self, *, retry_timeout: float = DEFAULT_RETRY_TIMEOUT_S) -> AsyncCkptClient:
        """Make an asynchronous client, as :meth:`get_conn` does.

        :param retry_timeout: how many seconds it repeats a request while the job manager is away.
        :raises CkptConnectionInvalid: for a field that cannot be used
        """
        endpoint = await self.aendpoint()
        address = await asyncio.to_thread(self._address, endpoint) if endpoint.ha_dir else endpoint.base_url
        with self._certificates_named(endpoint):
            return AsyncCkptClient(address, **_client_arguments(endpoint, retry_timeout))

    def _address(self, endpoint: Endpoint) -> str | LeaderSource:
        """Blocks on the first use of a directory, because its libraries are loaded then."""
        if endpoint.ha_dir is None:
            return endpoint.base_url
        return leader_of(self.ckpt_conn_id, endpoint.ha_dir, endpoint.cluster_id, endpoint.token)

    def base_url(self) -> str:
        """Return the job manager's address: the connection's, or the leader's; empty when no leader is found."""
        endpoint = self.endpoint()
        address = self._address(endpoint)
        if isinstance(address, str):
            return address
        try:
            with self.get_conn(endpoint=endpoint) as client:
                return client.run(address.find(endpoint.timeout)).url
        except CkptClientError as error:
            self.log.info("The leader's address cannot be shown: %s", error)
            return ""

    def savepoints(self, directory: str | None = None, job: str | None = None) -> tuple[Savepoint, ...]:
        """List the savepoints below a directory, or the configured one, the latest first: the catalogue.

        :param directory: an absolute path or URL; without one that which is configured for the job or the session.
        :param job: id or name of the job that took them.
        :raises CkptClientError: what the client raises; ``NotServed`` by a server without a catalogue.
        """
        with self.get_conn() as client:
            return client.list_savepoints(directory, job=job)

    def latest_good_savepoint(
        self, directory: str | None = None, job: str | None = None, before: datetime | None = None
    ) -> Savepoint | None:
        """Find the latest savepoint that is complete and did not fail its newest verification or drill, if any.

        :param directory: an absolute path or URL; without one that which is configured for the job or the session.
        :param job: id or name of the job that took them.
        :param before: only savepoints that had completed by this time: a job that starts from it reads everything
            since then again.
        :raises CkptClientError: as :meth:`savepoints`.
        """
        with self.get_conn() as client:
            try:
                before_ms = None if before is None else int(before.timestamp() * 1000)
                return client.latest_savepoint(directory, job=job, before_ms=before_ms)
            except NotFound:
                return None

    @contextmanager
    def _certificates_named(self, endpoint: Endpoint) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # ssl's errors are of this kind
            raise unusable_certificates(self.ckpt_conn_id, endpoint.verify, error) from error

    def test_connection(self) -> tuple[bool, str]:
        """Test the connection, as the *Test* button does: request the overview of the job manager."""
        try:
            # A person waits at the button.
            with self.get_conn(retry_timeout=0) as client:
                overview = client.cluster_overview()
                leader = client.url
        except CkptClientError as error:
            return False, self._of_the_form(advice.on_error(error, self.ckpt_conn_id))
        except CkptConnectionInvalid as error:
            return False, self._of_the_form(str(error))
        except AirflowNotFoundException:
            # The button passes it as a URI, and a connection that cannot be parsed back is lost.
            return False, "host or port: Airflow cannot read them back; a port must be a number from 1 to 65535"
        slots = f"{overview.slots_available} of {overview.slots_total} slots available"
        return True, f"version {overview.version}, leader {leader}, {slots}, {overview.jobs_running} jobs running"

    def _of_the_form(self, message: str) -> str:
        """Remove the connection's name: the button tries the connection under a random one."""
        named = f"connection {self.ckpt_conn_id!r}"
        return message.removeprefix(f"{named}, ").replace(f"the {named}", "this connection")


def unusable_certificates(conn_id: str, verify: bool | str, error: OSError) -> CkptConnectionInvalid:
    """Return the error for a file of certificate authorities that cannot be used; ``error`` is the reason."""
    return CkptConnectionInvalid(f"connection {conn_id!r}, ca_file: {verify!r} is not acceptable, {error}")


def _client_arguments(endpoint: Endpoint, retry_timeout: float) -> dict[str, Any]:
    return {
        "token": endpoint.token,
        "verify": endpoint.verify,
        "timeout_s": endpoint.timeout,
        "retry_timeout_s": retry_timeout,
    }


DEFAULT_PORT = 8081
DEFAULT_TIMEOUT_SECONDS = 30.0
DEFAULT_CLUSTER_ID = "default"
_LOOPBACK = "127.0.0.1"
_SCHEMES = ("http", "https")
_EXTRA = ("verify", "ca_file", "timeout", "browser_address", "ha_dir", "ha_cluster_id")
_CONN_TYPE = "ckpt"
_PORT_IN_HOST = re.compile(r"([^:\[\]]+|\[.*\]):\d*")
_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")


class ConnectionLike(Protocol):
    """The fields of an Airflow connection that are read here."""

    conn_id: str
    conn_type: str | None
    host: str | None
    schema: str | None
    port: int | None
    login: str | None
    password: str | None
    extra: str | None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of the job manager. ``verify`` is a bool or the path of a CA bundle; ``timeout`` is in seconds.

    ``base_url`` ends with a path where a proxy serves it at one.

    With ``ha_dir`` the leader is found there, and ``base_url`` is empty; ``host`` and ``port`` are for a session that
    is started, which may take any port then.

    ``browser_address`` is the address under which people's browsers reach it, if they do.
    """

    base_url: str
    host: str
    port: int
    token: str | None = field(default=None, repr=False)
    verify: bool | str = True
    timeout: float = DEFAULT_TIMEOUT_SECONDS
    browser_address: str | None = None
    ha_dir: str | None = None
    cluster_id: str = DEFAULT_CLUSTER_ID

    @property
    def options(self) -> dict[str, str]:
        """The configuration that a session needs so that this endpoint finds it."""
        if self.ha_dir is None:
            return {}
        return {
            "high-availability.type": "filesystem",
            "high-availability.storageDir": self.ha_dir,
            "high-availability.cluster-id": self.cluster_id,
        }

    @classmethod
    def of(cls, connection: ConnectionLike, decoded_extra: object) -> Endpoint:
        """Read a connection and its decoded extra.

        :raises CkptConnectionInvalid: naming the connection, the field, its value and what is allowed.
        """
        extra = _extra(connection, decoded_extra)
        token = _token(connection)
        if extra.get("ha_dir"):
            return cls._of_directory(connection, extra, token)
        scheme, host, path = _address(connection)
        port = _port(connection) or DEFAULT_PORT
        shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return cls(
            base_url=f"{scheme}://{shown}:{port}{path}",
            host=host,
            port=port,
            token=token,
            verify=_verify(connection, scheme, extra),
            timeout=_timeout(connection, extra.get("timeout")),
            browser_address=_browser_address(connection, extra.get("browser_address")),
        )

    @classmethod
    def _of_directory(cls, connection: ConnectionLike, extra: Mapping[str, Any], token: str | None) -> Endpoint:
        """The leader decides which address and scheme are used."""
        if connection.host:
            raise _refuse(connection, "host", connection.host, "it must be empty, because ha_dir is set")
        directory, cluster_id = extra["ha_dir"], extra.get("ha_cluster_id") or DEFAULT_CLUSTER_ID
        for name, value in (("ha_dir", directory), ("ha_cluster_id", cluster_id)):
            if not isinstance(value, str) or not value.strip():
                raise _refuse(connection, name, value, "it must be a text")
        return cls(
            base_url="",
            host=_LOOPBACK,
            port=_port(connection) or 0,
            token=token,
            verify=_verify(connection, "https", extra),
            timeout=_timeout(connection, extra.get("timeout")),
            ha_dir=directory.strip(),
            cluster_id=cluster_id.strip(),
            browser_address=_browser_address(connection, extra.get("browser_address")),
        )


def _refuse(connection: ConnectionLike, name: str, value: object, allowed: str) -> CkptConnectionInvalid:
    return CkptConnectionInvalid(f"connection {connection.conn_id!r}, {name}: {value!r} is not acceptable, {allowed}")


def _extra(connection: ConnectionLike, decoded: object) -> Mapping[str, Any]:
    """The extra's fields. Other types of connections, as those of derived hooks, may have fields of their own."""
    # Airflow turns a text that is not JSON into an empty object. The text is not shown: it may hold a secret.
    if not isinstance(decoded, Mapping) or (not decoded and (connection.extra or "").strip(" {}\n")):
        raise CkptConnectionInvalid(f"connection {connection.conn_id!r}, extra: it must be a JSON object")
    unknown = [key for key in decoded if key not in _EXTRA]
    if unknown and connection.conn_type == _CONN_TYPE:
        allowed = f"the fields are {', '.join(_EXTRA)}; a token belongs into the field Bearer token (password)"
        raise _refuse(connection, "extra", unknown[0], allowed)
    return decoded


def _token(connection: ConnectionLike) -> str | None:
    """The bearer token. An invalid value is not shown, since it is probably almost the token."""
    if connection.login and connection.conn_type == _CONN_TYPE:
        allowed = "it must be empty: only bearer tokens are supported, in the field Bearer token (password)"
        raise CkptConnectionInvalid(f"connection {connection.conn_id!r}, login: {allowed}")
    if not connection.password:
        return None
    try:
        check_token(connection.password, "Bearer token (password)")
    except InvalidToken as error:
        raise CkptConnectionInvalid(f"connection {connection.conn_id!r}, {error}") from None
    return connection.password


def _port(connection: ConnectionLike) -> int | None:
    if connection.port is not None and not 0 <= connection.port <= 65535:
        raise _refuse(connection, "port", connection.port, "it must be a number from 1 to 65535")
    return connection.port


def _address(connection: ConnectionLike) -> tuple[str, str, str]:
    """Scheme, host, and the path at which a proxy serves the job manager."""
    given = (connection.host or "").strip().rstrip("/")
    prefix, separator, rest = given.partition("://")
    host, slash, path = (rest if separator else given).partition("/")
    scheme = (prefix if separator else connection.schema or "http").strip().lower()
    if scheme not in _SCHEMES:
        raise _refuse(connection, "scheme", scheme, "it must be http or https")
    if _PORT_IN_HOST.fullmatch(host):
        raise _refuse(connection, "host", connection.host, "it contains a port, which belongs into the field Port")
    if not _is_host(host):
        raise _refuse(connection, "host", without_credentials(connection.host or ""), "it must be a name or an address")
    if not _PATH.fullmatch(slash + path):
        allowed = "a proxy's path in it must be like /gateway/totals"
        raise _refuse(connection, "host", without_credentials(connection.host or ""), allowed)
    return scheme, host, slash + path


def _is_host(host: str) -> bool:
    if not host or any(character in host for character in "?#@ "):
        return False
    try:
        host.strip("[]").encode("idna")
    except UnicodeError:  # an empty label, or one that is too long
        return False
    return True


def _verify(connection: ConnectionLike, scheme: str, extra: Mapping[str, Any]) -> bool | str:
    verify = extra.get("verify")
    if isinstance(verify, str) and verify.strip().lower() in ("", "true", "false"):
        verify = verify.strip().lower() != "false"
    if verify is not None and not isinstance(verify, bool):
        raise _refuse(connection, "verify", verify, "it must be true or false")
    if scheme == "http" or verify is False:
        return False
    ca_file = extra.get("ca_file")
    if ca_file and not Path(str(ca_file)).is_file():
        raise _refuse(connection, "ca_file", ca_file, "it must be a PEM file that can be read on this machine")
    return str(ca_file) if ca_file else True


def _timeout(connection: ConnectionLike, value: Any) -> float:
    if value is None or value == "":
        return DEFAULT_TIMEOUT_SECONDS
    try:
        timeout = float(value)
    except (TypeError, ValueError):
        timeout = 0.0
    if not 0 < timeout <= 600:
        raise _refuse(connection, "timeout", value, "it must be a number of seconds from above 0 to 600")
    return timeout


def _browser_address(connection: ConnectionLike, value: Any) -> str | None:
    if value is None or value == "":
        return None
    allowed = "it must be an address such as https://ckpt.example.com:8081, without user, query and fragment"
    try:
        parts = urlsplit(str(value).strip())
        usable = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or "@" in parts.netloc or parts.query or parts.fragment or re.search(r"\s", parts.geturl()):
        raise _refuse(connection, "browser_address", without_credentials(str(value)), allowed)
    return parts.geturl().rstrip("/")


def leader_of(conn_id: str, directory: str, cluster_id: str, token: str | None) -> LeaderSource:
    """The source of the leader of a connection that names a high-availability directory instead of an address.

    All tasks of a process that mean the same directory share one, and look the leader up together. The only place of
    the provider that imports more of the runtime than its client and the files of the pages, and only when such a
    connection is used: reading the directory takes fsspec, and what fsspec needs for its kind of storage.

    :raises CkptConnectionInvalid: for a directory or a name that cannot be used.
    """
    try:
        return _leader_directory(directory, cluster_id, token)
    except (ImportError, OSError, ValueError) as error:
        raise CkptConnectionInvalid(
            f"connection {conn_id!r}, ha_dir: {directory!r} (cluster {cluster_id!r}) is not acceptable, {error}"
        ) from error


@lru_cache(maxsize=32)
def _leader_directory(directory: str, cluster_id: str, token: str | None) -> LeaderSource:
    from ckpt_runtime.leader_retrieval import LeaderDirectory

    return LeaderDirectory(directory, cluster_id, token=token)
