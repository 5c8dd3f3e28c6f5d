"""A PostgreSQL server of the test run, in a temporary directory; its programs refuse to run as root."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.patience import patient
from tests.support.spark_sessions import free_port

PROGRAMS = Path("/usr/lib/postgresql")
"""Where Debian has a directory of programs for each version."""


def _program(name: str) -> str | None:
    """The path of one of the server's programs, which Debian leaves out of the search path."""
    versions = sorted(PROGRAMS.glob(f"*/bin/{name}"), key=lambda path: int(path.parents[1].name))
    return shutil.which(name) or (str(versions[-1]) if versions else None)


@contextmanager
def postgres_server() -> Iterator[str]:
    """Yields the URL of an empty database. The test is left out where the server is not installed."""
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
        run(pg_ctl, "--pgdata", str(data), "--wait", "--log", str(place / "log"), "--options", settings, "start")
        try:
            yield f"postgresql://ckpt@127.0.0.1:{port}/postgres"
        finally:
            run(pg_ctl, "--pgdata", str(data), "--wait", "--mode", "immediate", "stop")
    finally:
        shutil.rmtree(place, ignore_errors=True)
