"""TLS between workers and towards the driver: a peer without a certificate, or with another one, is refused by name."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.option import InvalidConfigurationError, OptionScope
from ckpt_runtime.configuration.validation import validate
from ckpt_runtime.jobmaster.control_endpoint import ControlEndpoint
from ckpt_runtime.network.agent_messages import TO_AGENT, Ping, ProcessIdentity, RegisterAgent
from ckpt_runtime.network.connections import ChannelLostError, ControlConnection
from ckpt_runtime.network.elements import EndOfPartition
from ckpt_runtime.network.framing import AuthenticationError, channel_id
from ckpt_runtime.network.tls import TlsFilesError, TlsSocket, credentials, internal_context, rest_context
from ckpt_runtime.network.transport import DataTransport
from tests.support.certificates import Authority, internal_options, rest_options
from tests.support.slot_agents import SlotListener
from tests.unit.runtime.network.test_transport import batch, new_channel, take, wait_until

SECRET = "secret"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(directory: Path) -> Authority:
    return Authority(directory)


def admitted(authority: Authority, name: str = "session", *, trusting: Authority | None = None, days: int = 1) -> str:
    """Credentials with a certificate of this authority, for peers with one of ``trusting``."""
    options = internal_options(authority.issue(name, days=days), trusting or authority)
    return credentials(SECRET, Configuration(options))


@pytest.fixture(scope="module")
def sound(authority: Authority) -> str:
    return admitted(authority)


@pytest.fixture(scope="module")
def others(directory: Path, authority: Authority) -> dict[str, str]:
    """Credentials that are refused, though the secret is right."""
    other = Authority(directory, "other-authority")
    return {
        "another authority": admitted(other, "other", trusting=authority),
        "expired": admitted(authority, "expired", days=-1),
        "no TLS": SECRET,
        "trusts another authority": admitted(authority, "trusting", trusting=other),
    }


REFUSED = ["another authority", "expired", "no TLS", "trusts another authority"]


@pytest.fixture
def receiver(sound: str) -> Iterator[DataTransport]:
    transport = DataTransport("127.0.0.1", sound)
    yield transport
    transport.close()


def test_rows_of_every_size_arrive_in_order(sound: str, receiver: DataTransport) -> None:
    """Both ways at once on one connection, records that are larger than one of TLS, and many that share one."""
    sender = DataTransport("127.0.0.1", sound)
    try:
        gate, channel = new_channel(window=3)
        wire = channel_id(1, 0)
        receiver.register(wire, channel)
        out = sender.connect(receiver.address, wire, 400, lambda: None)
        sent = [batch(index, rows) for index in range(40) for rows in (1, 100, 20_000)]
        writing = threading.Thread(target=lambda: [out.send_batch(one) for one in sent])
        writing.start()
        for expected in sent:
            assert take(gate) == expected
        writing.join()
        out.send_control(EndOfPartition())
        assert take(gate) == EndOfPartition()
        assert isinstance(next(iter(receiver._connections)).socket, TlsSocket)
    finally:
        sender.close()


def test_a_lost_peer_is_seen(sound: str, receiver: DataTransport) -> None:
    sender = DataTransport("127.0.0.1", sound)
    gate, channel = new_channel()
    wire = channel_id(1, 0)
    receiver.register(wire, channel)
    out = sender.connect(receiver.address, wire, 4, lambda: None)
    out.send_batch(batch(0))
    assert isinstance(take(gate), pa.RecordBatch)
    sender.close()
    assert isinstance(take(gate), ChannelLostError)


@pytest.mark.parametrize("who", REFUSED)
def test_worker_of_another_session_gets_no_channel(
    receiver: DataTransport, others: dict[str, str], who: str, caplog: pytest.LogCaptureFixture
) -> None:
    sender = DataTransport("127.0.0.1", others[who])
    try:
        with caplog.at_level(logging.WARNING), pytest.raises((AuthenticationError, ChannelLostError)) as refused:
            sender.connect(receiver.address, channel_id(1, 0), 4, lambda: None)
        if who != "no TLS":
            assert "security.ssl.internal" in str(refused.value)
        wait_until(lambda: "refused a data connection" in caplog.text, "the refusal in the log")
        assert "security.ssl.internal" in caplog.text
        assert not receiver._connections
    finally:
        sender.close()


def test_a_worker_with_tls_refuses_one_without(sound: str) -> None:
    plain, secure = DataTransport("127.0.0.1", SECRET), DataTransport("127.0.0.1", sound)
    try:
        with pytest.raises(AuthenticationError, match="security.ssl.internal"):
            secure.connect(plain.address, channel_id(1, 0), 4, lambda: None)
    finally:
        plain.close()
        secure.close()


def test_a_certificate_without_a_token_is_refused(receiver: DataTransport, sound: str) -> None:
    sender = DataTransport("127.0.0.1", sound.replace(SECRET, "guessed", 1))
    try:
        with pytest.raises((AuthenticationError, ChannelLostError)):
            sender.connect(receiver.address, channel_id(1, 0), 4, lambda: None)
    finally:
        sender.close()


loops: list[asyncio.AbstractEventLoop] = []


def with_endpoint(of_driver: str, dial: Any) -> SlotListener:
    """Runs ``dial(port)`` in a thread beside an endpoint."""
    listener = SlotListener()

    async def run() -> None:
        loops[:] = [asyncio.get_running_loop()]
        endpoint = ControlEndpoint("127.0.0.1", of_driver, listener)
        port = await endpoint.start()
        try:
            await asyncio.get_running_loop().run_in_executor(None, dial, port, listener)
        finally:
            await endpoint.stop()

    asyncio.run(run())
    return listener


def test_agents_talk_to_the_driver(sound: str) -> None:
    """Who receives waits in one thread, others send meanwhile; thirty times, so that each order of bytes is met."""

    def dial(port: int, listener: SlotListener) -> None:
        for number in range(30):
            connection = ControlConnection.dial(("127.0.0.1", port), sound)
            received: list[object] = []
            reading = threading.Thread(target=lambda link=connection, got=received: got.append(link.receive(TO_AGENT)))
            reading.start()
            listener.agent = None
            connection.send(RegisterAgent(f"slot-{number}", "127.0.0.1", (), ProcessIdentity("", 1, 1)))
            wait_until(lambda: listener.agent is not None, "the registration")
            loops[0].call_soon_threadsafe(listener.send, Ping())
            reading.join(60)
            assert received == [Ping()]
            assert connection.local_host == "127.0.0.1"
            connection.close()

    with_endpoint(sound, dial)


def test_close_wakes_a_thread_that_waits_for_the_driver(sound: str) -> None:
    def dial(port: int, _: SlotListener) -> None:
        connection = ControlConnection.dial(("127.0.0.1", port), sound)
        ended = threading.Event()

        def receive() -> None:
            with pytest.raises(OSError):
                connection.receive(TO_AGENT)
            ended.set()

        threading.Thread(target=receive).start()
        connection.close()
        assert ended.wait(60)

    with_endpoint(sound, dial)


@pytest.mark.parametrize("who", REFUSED)
def test_worker_of_another_session_cannot_register(
    sound: str, others: dict[str, str], who: str, caplog: pytest.LogCaptureFixture
) -> None:
    def dial(port: int, _: SlotListener) -> None:
        with pytest.raises(OSError) as refused:
            ControlConnection.dial(("127.0.0.1", port), others[who])
        if who != "no TLS":
            assert "security.ssl.internal" in str(refused.value)
        wait_until(lambda: "refused a control connection" in caplog.text, "the refusal in the log")

    with caplog.at_level(logging.WARNING):
        listener = with_endpoint(sound, dial)
    assert listener.agent is None


def test_a_silent_connection_delays_no_other(sound: str, receiver: DataTransport) -> None:
    with socket.create_connection(receiver.address):
        sender = DataTransport("127.0.0.1", sound)
        gate, channel = new_channel()
        receiver.register(channel_id(1, 0), channel)
        sender.connect(receiver.address, channel_id(1, 0), 4, lambda: None).send_batch(batch(0))
        assert isinstance(take(gate), pa.RecordBatch)
        sender.close()


@pytest.mark.parametrize("option", ["certificate", "key-file", "ca"])
def test_files_that_are_of_no_use_are_named(authority: Authority, tmp_path: Path, option: str) -> None:
    sound = internal_options(authority.issue("named"), authority)
    (tmp_path / "junk").write_text("junk")
    for path in ("/no/such/file", str(tmp_path / "junk")):
        options = {**sound, f"security.ssl.internal.{option}": path}
        with pytest.raises(TlsFilesError, match=rf"security\.ssl\.internal\.{option}: '{path}'"):
            credentials(SECRET, Configuration(options))


@pytest.mark.parametrize(
    ("mode", "accepted"), [(0o644, False), (0o604, False), (0o660, False), (0o640, True), (0o400, True)]
)
def test_a_key_that_other_users_can_read_or_change_is_refused_with_its_mode(
    authority: Authority, mode: int, accepted: bool
) -> None:
    made = authority.issue(f"mode-{mode:o}")
    made.key.chmod(mode)
    rest, internal = Configuration(rest_options(made)), Configuration(internal_options(made, authority))
    if accepted:
        rest_context(rest)
        credentials(SECRET, internal)
        return
    for options, prepare in ((rest, rest_context), (internal, lambda options: credentials(SECRET, options))):
        with pytest.raises(TlsFilesError, match=rf"key-file: '{made.key}' has mode {mode:04o}.*must have mode 0600"):
            prepare(options)


def test_a_key_with_a_passphrase_is_refused_without_asking(authority: Authority, tmp_path: Path) -> None:
    made = authority.issue("locked")
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", str(made.key), "-aes256", "-passout", "pass:geheim", "-out", str(locked)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no openssl command here")
    options = {**rest_options(made), "security.ssl.rest.key-file": str(locked)}
    with pytest.raises(TlsFilesError, match="without a passphrase"):
        rest_context(Configuration(options))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"security.ssl.rest.enabled": "true"}, "security.ssl.rest.certificate"),
        ({"security.ssl.internal.enabled": "true"}, "security.ssl.internal.certificate"),
        ({"security.ssl.rest.key-file": "/k"}, "security.ssl.rest.enabled=true"),
        ({"security.ssl.internal.ca": "/k"}, "security.ssl.internal.enabled=true"),
    ],
)
def test_incomplete_tls_options_are_refused_by_name(options: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidConfigurationError, match=named):
        validate(Configuration(options), OptionScope.CLUSTER)


def test_off_by_default() -> None:
    assert rest_context(Configuration({})) is None
    assert credentials(SECRET, Configuration({})) == SECRET
    assert internal_context(SECRET, "client") is None


def test_connections_between_workers_need_tls_1_3(sound: str, receiver: DataTransport) -> None:
    context = internal_context(sound, "client")
    assert context is not None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(receiver.address, timeout=60) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain)
