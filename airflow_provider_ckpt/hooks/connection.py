"""Reading an Airflow connection of type ``ckpt`` into the address and manners of a REST API. Opens no connection."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from airflow_provider_ckpt.exceptions import CkptConnectionInvalid
from ckpt_runtime.secret_keys import without_credentials

DEFAULT_PORT = 8081
DEFAULT_TIMEOUT_SECONDS = 30.0
DEFAULT_CLUSTER_ID = "default"
_LOOPBACK = "127.0.0.1"
_SCHEMES = ("http", "https")
_PORT_IN_HOST = re.compile(r"([^:\[\]]+|\[.*\]):\d*")


class ConnectionLike(Protocol):
    """The fields of an Airflow connection that are read here."""

    conn_id: str
    host: str | None
    schema: str | None
    port: int | None
    password: str | None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the job manager answers. ``verify`` is a bool or the path of a CA bundle; ``timeout`` is in seconds.

    With ``ha_dir`` the leader is found there, and ``base_url`` is empty; ``host`` and ``port`` are for a session that
    is started, which may take any port then.

    ``browser_address`` is where people's browsers reach it, if they do.
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
        """What a session needs in its configuration, so that this endpoint finds it."""
        if self.ha_dir is None:
            return {}
        return {
            "high-availability.type": "filesystem",
            "high-availability.storageDir": self.ha_dir,
            "high-availability.cluster-id": self.cluster_id,
        }

    @classmethod
    def of(cls, connection: ConnectionLike, extra: Mapping[str, Any]) -> Endpoint:
        """Read a connection and its decoded extra.

        :raises CkptConnectionInvalid: naming the connection, the field, its value and what is allowed.
        """
        if extra.get("ha_dir"):
            return cls._of_directory(connection, extra)
        scheme, host = _scheme_and_host(connection)
        port = connection.port or DEFAULT_PORT
        shown = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return cls(
            base_url=f"{scheme}://{shown}:{port}",
            host=host,
            port=port,
            token=connection.password or None,
            verify=_verify(connection, scheme, extra),
            timeout=_timeout(connection, extra.get("timeout")),
            browser_address=_browser_address(connection, extra.get("browser_address")),
        )

    @classmethod
    def _of_directory(cls, connection: ConnectionLike, extra: Mapping[str, Any]) -> Endpoint:
        """Where it leads to, and how, is the leader's to say."""
        if connection.host:
            raise _refuse(connection, "host", connection.host, "it must be empty, since ha_dir is given")
        directory, cluster_id = extra["ha_dir"], extra.get("ha_cluster_id") or DEFAULT_CLUSTER_ID
        for name, value in (("ha_dir", directory), ("ha_cluster_id", cluster_id)):
            if not isinstance(value, str) or not value.strip():
                raise _refuse(connection, name, value, "it must be a text")
        return cls(
            base_url="",
            host=_LOOPBACK,
            port=connection.port or 0,
            token=connection.password or None,
            verify=_verify(connection, "https", extra),
            timeout=_timeout(connection, extra.get("timeout")),
            ha_dir=directory.strip(),
            cluster_id=cluster_id.strip(),
            browser_address=_browser_address(connection, extra.get("browser_address")),
        )


def _refuse(connection: ConnectionLike, name: str, value: object, allowed: str) -> CkptConnectionInvalid:
    return CkptConnectionInvalid(f"connection {connection.conn_id!r}, {name}: {value!r} is not acceptable, {allowed}")


def _scheme_and_host(connection: ConnectionLike) -> tuple[str, str]:
    given = (connection.host or "").strip().rstrip("/")
    prefix, separator, rest = given.partition("://")
    host = rest if separator else given
    scheme = (prefix if separator else connection.schema or "http").strip().lower()
    if scheme not in _SCHEMES:
        raise _refuse(connection, "scheme", scheme, "it must be http or https")
    if _PORT_IN_HOST.fullmatch(host):
        raise _refuse(connection, "host", connection.host, "it contains a port, which belongs into the field Port")
    if not host or any(character in host for character in "/?#@ "):
        raise _refuse(connection, "host", connection.host, "it must be a host name or address without a path")
    return scheme, host


def _verify(connection: ConnectionLike, scheme: str, extra: Mapping[str, Any]) -> bool | str:
    verify = extra.get("verify")
    if isinstance(verify, str) and verify.strip().lower() in ("true", "false"):
        verify = verify.strip().lower() == "true"
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
