"""The hook: from an Airflow connection to a REST client, synchronous for workers and asynchronous for triggers.

It adds nothing to the client: the client defines which requests the job manager takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException

from airflow_provider_ckpt import advice
from airflow_provider_ckpt.exceptions import CkptConnectionInvalid
from airflow_provider_ckpt.hooks.connection import Endpoint, leader_of
from ckpt_runtime.client.clients import AsyncCkptClient, CkptClient
from ckpt_runtime.client.errors import CkptClientError, NotFound
from ckpt_runtime.client.leader import LeaderSource
from ckpt_runtime.client.savepoint_models import Savepoint
from ckpt_runtime.client.waiting import DEFAULT_PATIENCE_S


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
        patience: float = DEFAULT_PATIENCE_S,
        on_away: Callable[[CkptClientError], None] | None = None,
        endpoint: Endpoint | None = None,
    ) -> CkptClient:
        """Make a new synchronous client; use it as a context manager.

        When the job manager refuses the token, the connection is read once more: a session that has restarted may have
        another, and the connection too by then.

        :param patience: how many seconds it repeats a request while the job manager is away.
        :param on_away: is called each time.
        :param endpoint: the connection as it was read before; it is not read again.
        :raises CkptConnectionInvalid: for a field that cannot be used
        """
        known = endpoint or self.endpoint()
        address = self._address(known)
        with self._certificates_named(known):
            client = CkptClient(address, **_client_arguments(known, patience), on_away=on_away)
        if endpoint is None:
            client.calls.renew_token = lambda: self._token_instead(known)
        return client

    def _token_instead(self, refused: Endpoint) -> str | None:
        """Return the connection's current token, if it still leads to the same place."""
        now = self.endpoint()
        if now.token == refused.token or replace(now, token=refused.token) != refused:
            return None
        self.log.info("The token was refused; the connection %r has another one by now", self.ckpt_conn_id)
        return now.token

    async def aget_conn(self, *, patience: float = DEFAULT_PATIENCE_S) -> AsyncCkptClient:
        """Make an asynchronous client, as :meth:`get_conn` does.

        :param patience: how many seconds it repeats a request while the job manager is away.
        :raises CkptConnectionInvalid: for a field that cannot be used
        """
        endpoint = await self.aendpoint()
        address = await asyncio.to_thread(self._address, endpoint) if endpoint.ha_dir else endpoint.base_url
        with self._certificates_named(endpoint):
            return AsyncCkptClient(address, **_client_arguments(endpoint, patience))

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
            self.log.info("No leader's address to show: %s", error)
            return ""

    def savepoints(self, directory: str | None = None, job: str | None = None) -> tuple[Savepoint, ...]:
        """List the savepoints below a directory, or the configured one, the latest first: the catalogue.

        :param directory: an absolute path or URL; without one that which is configured for the job or the session.
        :param job: id or name of the job that took them.
        :raises CkptClientError: what the client raises; ``NotServed`` by a server without a catalogue.
        """
        with self.get_conn() as client:
            return client.list_savepoints(directory, job=job)

    def latest_good_savepoint(self, directory: str | None = None, job: str | None = None) -> Savepoint | None:
        """Find the latest of them that is complete and did not fail its newest verification or drill, if any.

        :param directory: an absolute path or URL; without one that which is configured for the job or the session.
        :param job: id or name of the job that took them.
        :raises CkptClientError: as :meth:`savepoints`.
        """
        with self.get_conn() as client:
            try:
                return client.latest_savepoint(directory, job=job)
            except NotFound:
                return None

    @contextmanager
    def _certificates_named(self, endpoint: Endpoint) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # ssl's errors are of this kind
            raise unusable_certificates(self.ckpt_conn_id, endpoint.verify, error) from error

    def test_connection(self) -> tuple[bool, str]:
        """Do what the *Test* button does: ask the job manager for its overview."""
        try:
            # A person waits at the button.
            with self.get_conn(patience=0) as client:
                overview = client.cluster_overview()
                leader = client.url
        except CkptClientError as error:
            return False, self._of_the_form(advice.on_error(error, self.ckpt_conn_id))
        except CkptConnectionInvalid as error:
            return False, self._of_the_form(str(error))
        except AirflowNotFoundException:
            # The button hands it over as a URI, and one that cannot be parsed again is nowhere.
            return False, "host or port: Airflow cannot read them back; a port must be a number from 1 to 65535"
        slots = f"{overview.slots_available} of {overview.slots_total} slots available"
        return True, f"version {overview.version}, leader {leader}, {slots}, {overview.jobs_running} jobs running"

    def _of_the_form(self, message: str) -> str:
        """Remove the connection's name: the button tries the connection under a random one."""
        named = f"connection {self.ckpt_conn_id!r}"
        return message.removeprefix(f"{named}, ").replace(f"the {named}", "this connection")


def unusable_certificates(conn_id: str, verify: bool | str, error: OSError) -> CkptConnectionInvalid:
    """Return the error for the file of certificate authorities that ``error`` makes unusable."""
    return CkptConnectionInvalid(f"connection {conn_id!r}, ca_file: {verify!r} is not acceptable, {error}")


def _client_arguments(endpoint: Endpoint, patience: float) -> dict[str, Any]:
    return {
        "token": endpoint.token,
        "verify": endpoint.verify,
        "timeout_s": endpoint.timeout,
        "patience_s": patience,
    }
