"""A PostgreSQL server of the test run, in a temporary directory; its programs refuse to run as root."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.patience import patient
from tests.support.processes import children
from tests.support.spark_sessions import free_port

PROGRAMS = Path("/usr/lib/postgresql")
"""Where Debian has a directory of programs for each version."""


def _program(name: str) -> str | None:
    """The path of one of the server's programs, which Debian leaves out of the search path."""
    versions = sorted(PROGRAMS.glob(f"*/bin/{name}"), key=lambda path: int(path.parents[1].name))
    return shutil.which(name) or (str(versions[-1]) if versions else None)


class PostgresServer:
    """A running server. ``url`` leads to an empty database of it."""

    def __init__(self, url: str, data: Path, start: Callable[[], None], crash: Callable[[], None]) -> None:
        self.url = url
        self._data = data
        self._start = start
        self._crash = crash

    @contextmanager
    def silent(self) -> Iterator[None]:
        """No process of the server does anything inside the block; connections stay."""
        first = int((self._data / "postmaster.pid").read_text().split()[0])
        # The first process is stopped first, so that it starts no other.
        os.kill(first, signal.SIGSTOP)
        others = children(first)
        for process in others:
            os.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            for process in (*others, first):
                os.kill(process, signal.SIGCONT)

    @contextmanager
    def down(self) -> Iterator[None]:
        """The server crashes, and starts again at the end of the block."""
        self._crash()
        try:
            yield
        finally:
            self._start()


@contextmanager
def postgres_server() -> Iterator[str]:
    """Yields the URL of an empty database. The test is left out where the server is not installed."""
    with running_postgres() as server:
        yield server.url


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """Yields a server with an empty database. The test is left out where it is not installed."""
    initdb, pg_ctl = _program("initdb"), _program("pg_ctl")
    if initdb is None or pg_ctl is None:
        pytest.skip("PostgreSQL's server is not installed: apt-get install postgresql")
    user = "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    place = Path(tempfile.mkdtemp(prefix="ckpt-postgres-", dir="/tmp"))
    data, port = place / "data", free_port()
    if os.geteuid() == 0:
        shutil.chown(place, user)
    settings = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={place} -c fsync=off"
    settings += " -c max_prepared_transactions=16"

    def run(*command: str) -> None:
        done = subprocess.run(
            command,
            check=False,
            user=user if os.geteuid() == 0 else None,
            cwd=place,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=patient(120),
        )
        assert done.returncode == 0, done.stderr

    try:
        run(initdb, "--pgdata", str(data), "--username", "ckpt", "--auth", "trust", "--no-sync", "--encoding", "UTF8")

        def start() -> None:
            run(pg_ctl, "--pgdata", str(data), "--wait", "--log", str(place / "log"), "--options", settings, "start")

        def crash() -> None:
            run(pg_ctl, "--pgdata", str(data), "--wait", "--mode", "immediate", "stop")

        start()
        try:
            yield PostgresServer(f"postgresql://ckpt@127.0.0.1:{port}/postgres", data, start, crash)
        finally:
            crash()
    finally:
        shutil.rmtree(place, ignore_errors=True)
