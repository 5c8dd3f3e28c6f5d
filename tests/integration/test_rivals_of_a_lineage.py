"""Several clients submit, resume, stop, cancel and hold one lineage at random: of its jobs one lives at a time.

The oracle looks at the times at which jobs began and ended, as the session reports them, and at nothing that decides
about lineages.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import fast, program_of

pytestmark = [pytest.mark.slow, pytest.mark.long]

CLIENTS = 4
REQUESTS = 60
"""How many requests each client sends."""
ENDED = {"FINISHED", "CANCELED", "FAILED"}
REFUSALS = {400, 404, 409}
"""No such snapshot any more, no such job, and a lineage that another one has."""


class Client:
    """Sends random requests about the jobs of one lineage."""

    def __init__(self, url: str, program: str, directory: Path, seed: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=180)
        self._program = program
        self._directory = directory
        self._choice = Random(seed)
        self._owner = f"client-{seed}"
        self.answers: Counter[tuple[str, int]] = Counter()
        self.failures: list[str] = []

    def start(self, **more: Any) -> httpx.Response:
        """Without a snapshot in ``more`` a job begins from nothing."""
        configuration = fast(
            execution__checkpointing__dir=str(self._directory / "checkpoints"),
            execution__checkpointing__externalized_checkpoint_retention="RETAIN_ON_CANCELLATION",
            pipeline__name="contended",
            pipeline__unique_name="true",
        )
        arguments = ["--output", str(self._directory / "out"), "--rate", "400", "--batch", "16"]
        body = {"entryClass": "sequence:pipeline", "programArgsList": arguments, "flinkConfiguration": configuration}
        return self._http.post(f"/jars/{self._program}/run", json={**body, "parallelism": 1, **more})

    def run(self) -> None:
        try:
            for _ in range(REQUESTS):
                kind = self._choice.choice(["start", "resume", "resume", "stop", "cancel", "hold", "release"])
                answer = self._request(kind)
                if answer is not None:
                    self.answers[kind, answer.status_code] += 1
                    if not answer.is_success and answer.status_code not in REFUSALS:
                        self.failures.append(f"{kind}: {answer.status_code} {answer.text}")
        except Exception as error:
            self.failures.append(repr(error))
        finally:
            self._http.close()

    def _request(self, kind: str) -> httpx.Response | None:
        known = self.jobs()
        job = self._choice.choice(known)["jid"]
        living = [entry["jid"] for entry in known if entry["state"] not in ENDED]
        match kind:
            case "start":
                return self.start()
            case "resume":
                snapshots = self._snapshots(job)
                return self.start(savepointPath=self._choice.choice(snapshots)) if snapshots else None
            case "stop" if living:
                body = {"targetDirectory": str(self._directory / "savepoints"), "drain": False}
                return self._http.post(f"/jobs/{living[0]}/stop", json=body)
            case "cancel" if living:
                return self._http.patch(f"/jobs/{living[0]}?mode=cancel&retain=true")
            case "hold":
                body = {"owner": self._owner, "duration": self._choice.choice([100, 1_000])}
                return self._http.put(f"/jobs/{job}/upgrade", json=body)
            case "release":
                return self._http.delete(f"/jobs/{job}/upgrade?owner={self._owner}")
        return None

    def jobs(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self._http.get("/jobs/overview").json()["jobs"]
        return [job for job in answer if job["name"] == "contended"]

    def _snapshots(self, job: str) -> list[str]:
        latest = self._http.get(f"/jobs/{job}/checkpoints").json().get("latest", {})
        taken = [latest.get(kind) for kind in ("completed", "savepoint")]
        return [snapshot["external_path"] for snapshot in taken if snapshot]


@pytest.fixture
def clients(cluster: MiniCluster, tmp_path: Path) -> Iterator[list[Client]]:
    with httpx.Client(base_url=cluster.rest_url, timeout=180) as http:
        filename, content = pack_pipeline(program_of("sequence"))
        stored = http.post("/jars/upload", files={"jarfile": (filename, content)}).json()["filename"]
        yield [Client(cluster.rest_url, stored.rpartition("/")[2], tmp_path, seed) for seed in range(CLIENTS)]
        for job in http.get("/jobs/overview").json()["jobs"]:
            if job["name"] == "contended" and job["state"] not in ENDED:
                http.patch(f"/jobs/{job['jid']}?mode=cancel")


@pytest.mark.row("air.4")
def test_at_most_one_job_of_a_lineage_lives_while_several_clients_send_requests(
    cluster: MiniCluster, clients: list[Client]
) -> None:
    first = clients[0].start().json()["jobid"]
    cluster.wait_for_checkpoints(first, 1)
    threads = [threading.Thread(target=client.run) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [failure for client in clients for failure in client.failures] == []
    with httpx.Client(base_url=cluster.rest_url, timeout=180) as http:
        known = [job for job in http.get("/jobs/overview").json()["jobs"] if job["name"] == "contended"]
    lives = sorted((job["start-time"], job["end-time"], job["jid"]) for job in known)
    for (_, ended, before), (began, _, behind) in pairwise(lives):
        assert 0 < ended <= began, f"{before} and {behind} lived at the same time"
    answers = sum((client.answers for client in clients), Counter[tuple[str, int]]())
    refused = sum(count for (kind, status), count in answers.items() if kind in ("start", "resume") and status == 409)
    assert len(lives) > 3, answers
    assert refused > 10, answers
