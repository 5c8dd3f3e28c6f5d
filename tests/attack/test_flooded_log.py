"""A real session whose user code prints without end, and whose options hold a secret."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.jobs import RunOptions
from ckpt_runtime.spark.launch import SessionInfo, start_session, stop_session
from tests.support.jobs import PIPELINES
from tests.support.patience import patient
from tests.support.processes import command_line, members
from tests.support.spark_sessions import wait_until

pytestmark = [pytest.mark.attack, pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]
KEPT = 1
SIZE = 256 << 10
SECRET = "do-not-show-this"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionInfo]:
    directory = tmp_path_factory.mktemp("session")
    conf = {"env.log.max-size": str(SIZE), "env.log.max": str(KEPT), "my.db.password": SECRET}
    started = start_session("local", 1, log_file=directory / "session.log", conf=conf)
    yield started
    stop_session(started)


def test_secret_options_are_in_no_command_line_no_file_and_no_answer(session: SessionInfo) -> None:
    processes = members(session.pid)
    assert len(processes) >= 2
    assert not [pid for pid in processes if SECRET in command_line(pid)]
    files = [file for file in Path(session.log_file).parent.iterdir() if file.is_file()]
    assert not [file for file in files if SECRET.encode() in file.read_bytes()]
    with CkptClient(session.rest_url, token=session.token) as client:
        shown = client.cluster_configuration()
    assert shown["my.db.password"] == "******"


def test_output_of_user_code_does_not_fill_the_disk(session: SessionInfo) -> None:
    log = Path(session.log_file)

    names = [f"{log.name}.{number}" for number in range(1, KEPT + 1)]

    def newest() -> int:
        """When the newest of the files that are kept was written. They are renamed now and then."""
        with suppress(FileNotFoundError):
            return (log.parent / names[0]).stat().st_mtime_ns
        return 0

    def bounded() -> bool:
        """So many files, and none of them is large."""
        with suppress(FileNotFoundError):
            files = sorted(file for file in log.parent.iterdir() if file.name.startswith(log.name))
            sizes = {file.name: file.stat().st_size for file in files}
            # With the last of a file comes what is written while it is copied.
            return [*sizes] == [log.name, *names] and sizes[log.name] <= SIZE and max(sizes.values()) <= 2 * SIZE
        return False

    with CkptClient(session.rest_url, token=session.token) as client:
        pipeline = client.upload_pipeline(*pack_pipeline(PIPELINES / "noisy.py"))
        for _ in range(KEPT + 1):
            known = newest()
            job_id = client.run_pipeline(pipeline, RunOptions(arguments=("200000", "10"), parallelism=1))
            client.wait_for_state(job_id, ["FINISHED"], timeout_s=patient(180))
            wait_until(lambda known=known: newest() > known, "a rotation")
    wait_until(bounded, "the last rotation")
