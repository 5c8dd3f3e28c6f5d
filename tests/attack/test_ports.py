"""Another user of the machine at every port of a session: no port answers, no registration succeeds, no task ends."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from ckpt_runtime.network.agent_messages import ProcessIdentity, RegisterAgent
from ckpt_runtime.network.connections import ControlConnection
from ckpt_runtime.spark.protection import CONTROL_SECRET, SETTINGS
from tests.attack.conftest import AttackedSession, OpenSpark
from tests.support.open_spark import ENDPOINT
from tests.support.patience import patient
from tests.support.spark_protocol import Refused, SparkConnection, to_endpoint
from tests.support.spark_sessions import wait_until

pytestmark = [pytest.mark.attack, pytest.mark.spark, pytest.mark.timeout(600)]

AsOtherUser = Callable[[Callable[[], Any]], Any]
VERIFIER = "endpoint-verifier"


def _fetches_a_broadcast(port: int) -> bool:
    with suppress(Refused), SparkConnection(port) as connection:
        return any(connection.block(f"broadcast_{number}_piece0") is not None for number in range(3))
    return False


def _reaches_the_rpc(port: int, check: bytes) -> bool:
    with suppress(Refused), SparkConnection(port) as connection:
        return connection.ask(to_endpoint(port, VERIFIER, check)) is not None
    return False


def _ends_tasks(port: int, kills: list[bytes], check: bytes) -> None:
    """Returns when all was read there: an answer comes behind it, or the end of the connection."""
    with suppress(Refused), SparkConnection(port) as connection:
        for kill in kills:
            connection.tell(to_endpoint(port, ENDPOINT, kill))
        connection.ask(to_endpoint(port, VERIFIER, check))


def _registers(port: int) -> bool:
    """As an agent or a worker of the engine would, with what the configuration shows in the secret's place."""
    try:
        connection = ControlConnection.dial(("127.0.0.1", port), SETTINGS[CONTROL_SECRET])
    except OSError:
        return False
    connection.send(RegisterAgent("0-0", "127.0.0.1", (), ProcessIdentity("", 1, 0)))
    connection.close()
    return True


def _is_served(port: int, request: bytes) -> bytes:
    """What comes back, or nothing within a second."""
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.settimeout(1)
        try:
            connection.sendall(request)
            return connection.recv(4096)
        except OSError:
            return b""


def _harm(port: int, check: bytes) -> list[str]:
    """What a port gives to a client without a secret."""
    http = _is_served(port, b"GET /jobs/overview HTTP/1.1\r\nHost: localhost\r\n\r\n")
    gateway = _is_served(port, b"c\nz:java.lang.System\nexit\ni3\ne\n")
    found = {
        "broadcasts": _fetches_a_broadcast(port),
        "the RPC": _reaches_the_rpc(port, check),
        "a place for an agent": _registers(port),
        "jobs over HTTP": http.startswith(b"HTTP/1.1 2"),
        "Java objects": gateway.startswith(b"!y"),
    }
    return [what for what, given in found.items() if given]


def _at_all(ports: dict[int, str], attack: Callable[[int], Any]) -> list[tuple[str, Any]]:
    """At once: a port that says nothing is waited for."""
    with ThreadPoolExecutor(len(ports)) as pool:
        return list(zip(ports.values(), pool.map(attack, ports), strict=True))


def test_the_attacks_succeed_on_a_spark_application_without_authentication(
    open_spark: OpenSpark, as_other_user: AsOtherUser
) -> None:
    wait_until(lambda: open_spark.attempts() == 1, "the task to begin")
    assert as_other_user(lambda: _fetches_a_broadcast(open_spark.block_port))
    assert as_other_user(lambda: _reaches_the_rpc(open_spark.rpc_port, open_spark.check))
    as_other_user(lambda: _ends_tasks(open_spark.rpc_port, open_spark.kills, open_spark.check))
    wait_until(lambda: open_spark.attempts() == 2, "the task to begin again")


def test_ports_reveal_nothing_to_other_users(
    attacked: AttackedSession, open_spark: OpenSpark, as_other_user: AsOtherUser
) -> None:
    ports = attacked.ports()
    names = sorted(ports.values())
    assert names.count("java") == 3, "the gateway of Python, the RPC, the block manager"
    assert names.count("ckpt-worker") >= 2
    python = [name for name in names if name.startswith("python")]
    assert len(python) == 3, "REST, Spark Connect and control; no daemon's, no other"
    given = as_other_user(lambda: _at_all(ports, lambda port: _harm(port, open_spark.check)))
    assert [(name, what) for name, what in given if what] == []


def test_a_kill_ends_no_task(attacked: AttackedSession, open_spark: OpenSpark, as_other_user: AsOtherUser) -> None:
    workers = [process for process in attacked.processes() if process.name() == "ckpt-worker"]
    restarts = attacked.restarts()
    ports = attacked.ports()
    as_other_user(lambda: _at_all(ports, lambda port: _ends_tasks(port, open_spark.kills, open_spark.check)))
    done = attacked.completed()
    wait_until(lambda: attacked.completed() >= done + 2, "two more checkpoints")
    assert attacked.restarts() == restarts
    assert all(worker.is_running() for worker in workers)


def test_no_socket_file_can_be_connected_to(attacked: AttackedSession, as_other_user: AsOtherUser) -> None:
    def connected(path: str) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(path)
            except PermissionError:
                return False
            return True

    paths = attacked.sockets()
    assert len(paths) >= 3, "Spark talks to Python over files"
    assert [path for path in paths if as_other_user(lambda path=path: connected(path))] == []


SCHEMA = """
import sys
from pyspark.sql import SparkSession
print(SparkSession.builder.remote(sys.argv[1]).getOrCreate().range(3).schema.names)
"""
CALLS = """
import grpc, json, sys
from pyspark.sql.connect.proto import AnalyzePlanRequest, AnalyzePlanResponse
request = AnalyzePlanRequest(session_id="0" * 8 + "-0000-4000-8000-" + "0" * 12)
request.spark_version.SetInParent()
asked = []
for port in sys.argv[2:]:
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    call = channel.unary_unary(
        "/spark.connect.SparkConnectService/AnalyzePlan",
        AnalyzePlanRequest.SerializeToString,
        AnalyzePlanResponse.FromString,
    )
    for token in ("", "wrong"):
        metadata = (("authorization", f"Bearer {token}"),)
        asked.append((port, channel, call.future(request, timeout=float(sys.argv[1]), metadata=metadata)))
answers = {}
for port, channel, answer in asked:
    try:
        answers[port] = answer.result().spark_version.version
    except grpc.RpcError as error:
        answers.setdefault(port, error.code().name)
print(json.dumps(answers))
"""


def test_spark_connect_and_the_spark_service_it_uses_refuse_clients_without_tokens(attacked: AttackedSession) -> None:
    def run(code: str, *arguments: str) -> str:
        command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=patient(120)).stdout

    url = f"sc://localhost:{attacked.connect_port}/;token={attacked.info.token}"
    assert run(SCHEMA, url) == "['id']\n"
    ports = {str(port): name for port, name in attacked.ports().items()}
    answers = json.loads(run(CALLS, str(patient(5)), *ports))
    refused = [ports[port] for port, answer in answers.items() if answer == "UNAUTHENTICATED"]
    assert sorted(name[:4] for name in refused) == ["java", "pyth"], answers
    assert [answer for answer in answers.values() if answer.startswith("4.")] == []
