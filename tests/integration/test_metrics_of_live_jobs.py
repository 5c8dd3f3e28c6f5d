"""Metrics of a running job for the clients of Flink that read them, compared with the rows that its sinks show."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob
from tests.support.outputs import assert_sequence, visible

PARALLELISM = 2
PROCESS = (
    "Status.JVM.Memory.Heap.Max",
    "Status.JVM.Memory.Heap.Used",
    "Status.Flink.Memory.Managed.Used",
    "Status.JVM.Memory.Metaspace.Used",
)


class RestReader:
    """Sends requests as the OpenTelemetry receiver does: paths are put together without any escaping."""

    def __init__(self, cluster: MiniCluster) -> None:
        self._url = cluster.rest_url

    def get(self, path: str) -> Any:
        answer = httpx.get(self._url + path, timeout=60)
        assert answer.status_code == 200, (path, answer.text)
        return answer.json()

    def metrics(self, path: str) -> dict[str, str]:
        """Lists the names, then asks for the values of all of them."""
        names = [metric["id"] for metric in self.get(path)]
        assert all(re.fullmatch(r"[A-Za-z0-9_.-]+", name) for name in names)
        values = {metric["id"]: metric["value"] for metric in self.get(f"{path}?get={','.join(names)}")}
        assert list(values) == names
        return values


@pytest.fixture(scope="module")
def reader(cluster: MiniCluster) -> RestReader:
    return RestReader(cluster)


@pytest.fixture(scope="module")
def live(cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SequenceJob]:
    """A job that has completed a checkpoint and whose subtasks have all been measured twice."""
    job = SequenceJob(cluster, tmp_path_factory.mktemp("metrics"))
    job.start(rate=200, parallelism=PARALLELISM)
    job.running()
    cluster.wait_for_checkpoints(job.job_id, 2)
    vertices = [vertex.vertex_id for vertex in cluster.call(cluster.dispatcher.job_details(job.job_id)).vertices]

    def measured() -> bool:
        found = [cluster.call(cluster.dispatcher.vertex_metrics(job.job_id, vertex)) for vertex in vertices]
        values = [own for subtasks in found for own in subtasks.values()]
        return all(found) and all("checkpointAlignmentTime" in own for own in values)

    cluster.wait_until(measured, "measurements of all subtasks")
    yield job
    job.end()


def test_opentelemetry_receiver_reads_every_metric_that_is_listed(reader: RestReader, live: SequenceJob) -> None:
    driver = reader.metrics("/jobmanager/metrics")
    assert driver.keys() >= {*PROCESS, "taskSlotsTotal", "Status.JVM.CPU.Load", "Status.JVM.Threads.Count"}
    vertices = reader.get(f"/jobs/{live.job_id}")["vertices"]
    # A slot of an earlier job that is listed, too, may be released before it is asked for; those of the live job stay.
    slots = {
        slot["taskmanager-id"]
        for vertex in vertices
        for slot in reader.get(f"/jobs/{live.job_id}/vertices/{vertex['id']}/taskmanagers")["taskmanagers"]
    }
    assert len(slots) == PARALLELISM
    assert slots <= {slot["id"] for slot in reader.get("/taskmanagers")["taskmanagers"]}
    for slot in slots:
        worker = reader.metrics(f"/taskmanagers/{slot}/metrics")
        assert 0 < int(worker["Status.JVM.Memory.Heap.Used"]) <= int(worker["Status.JVM.Memory.Heap.Max"])
    for job in reader.get("/jobs/overview")["jobs"]:
        assert "numRestarts" in reader.metrics(f"/jobs/{job['jid']}/metrics")
    assert live.job_id in [job["id"] for job in reader.get("/jobs")["jobs"]]
    for vertex in vertices:
        for subtask in reader.get(f"/jobs/{live.job_id}/vertices/{vertex['id']}")["subtasks"]:
            path = f"/jobs/{live.job_id}/vertices/{vertex['id']}/subtasks/{subtask['subtask']}/metrics"
            found = reader.metrics(path)
            assert found.keys() >= {"numRecordsIn", "numRecordsOut", "buffers.inPoolUsage", "isBackPressured"}
            assert any(name.endswith(".numRecordsOut") for name in found)


def test_autoscaler_of_flink_finds_what_it_requires(reader: RestReader, live: SequenceJob) -> None:
    (heap, used, managed, metaspace) = reader.get(f"/taskmanagers/metrics?get={','.join(PROCESS)}&agg=min,max,avg")
    assert [one["id"] for one in (heap, used, managed, metaspace)] == list(PROCESS)
    assert used["min"] <= used["avg"] <= used["max"] <= heap["max"]
    slots = reader.get("/jobmanager/metrics?get=taskSlotsTotal,taskSlotsAvailable")
    assert [metric["id"] for metric in slots] == ["taskSlotsTotal", "taskSlotsAvailable"]
    graph = reader.get(f"/jobs/{live.job_id}/plan")["plan"]["nodes"]
    sources = 0
    for node in graph:
        path = f"/jobs/{live.job_id}/vertices/{node['id']}/subtasks/metrics"
        names = [metric["id"] for metric in reader.get(path)]
        wanted = ["busyTimeMsPerSecond", "backPressuredTimeMsPerSecond"]
        if node.get("inputs"):
            wanted.append("numRecordsInPerSecond")
        else:
            sources += 1
            for end in ("numRecordsIn", "numRecordsOut", "numRecordsInPerSecond", "numRecordsOutPerSecond"):
                wanted += [next(n for n in names if n.startswith("Source__") and n.endswith(f".{end}"))]
        values = reader.get(f"{path}?get={','.join(wanted)}&agg=min,max,avg,sum")
        assert [metric["id"] for metric in values] == wanted
        assert all(metric["min"] <= metric["avg"] <= metric["max"] <= metric["sum"] for metric in values)
    assert sources == 1


def _samples(cluster: MiniCluster, live: SequenceJob, name: str) -> list[Sample]:
    return [
        sample
        for family in text_string_to_metric_families(httpx.get(f"{cluster.rest_url}/metrics", timeout=60).text)
        for sample in family.samples
        if sample.name == name and sample.labels.get("job_id", live.job_id) == live.job_id
    ]


def test_prometheus_reads_the_names_and_labels_of_flinks_reporter(cluster: MiniCluster, live: SequenceJob) -> None:
    task = {"host", "tm_id", "job_id", "job_name", "task_id", "task_name", "task_attempt_num", "subtask_index"}
    for name in (
        "numRecordsIn",
        "numBytesOutPerSecond",
        "busyTimeMsPerSecond",
        "buffers_outPoolUsage",
        "checkpointStartDelayNanos",
    ):
        found = _samples(cluster, live, f"flink_taskmanager_job_task_{name}")
        assert found
        assert all(sample.labels.keys() == task for sample in found)
    operators = _samples(cluster, live, "flink_taskmanager_job_task_operator_numRecordsOut")
    assert all(sample.labels.keys() == {*task, "operator_id", "operator_name"} for sample in operators)
    indices = sorted(s.labels["subtask_index"] for s in operators if s.labels["operator_id"] == "numbers")
    assert indices == [str(index) for index in range(PARALLELISM)]
    for name in ("FullSize", "ProcessedData", "PersistedData", "Size", "Duration"):
        [latest] = _samples(cluster, live, f"flink_jobmanager_job_lastCheckpoint{name}")
        assert (latest.labels.keys(), latest.value >= 0) == ({"job_id", "job_name"}, True), name
    assert _samples(cluster, live, "flink_jobmanager_job_lastCompletedCheckpointId")[0].value >= 2
    assert _samples(cluster, live, "flink_jobmanager_job_fullRestarts")[0].value == 0
    workers = _samples(cluster, live, "flink_taskmanager_Status_JVM_Memory_Heap_Used")
    assert {sample.labels["tm_id"] for sample in workers} >= {sample.labels["tm_id"] for sample in operators}
    assert [sample.value for sample in _samples(cluster, live, "ckpt_metrics_series_left_out")] == [0]


def test_counted_records_are_at_least_the_visible_rows_before_and_at_most_those_after(
    cluster: MiniCluster, live: SequenceJob
) -> None:
    before = len(visible(live.out / "order"))
    assert before > 0

    def written() -> float:
        found = _samples(cluster, live, "flink_taskmanager_job_task_operator_numRecordsIn")
        return sum(sample.value for sample in found if sample.labels["operator_id"] == "order-sink")

    # A heartbeat may be older than the visible rows.
    cluster.wait_until(lambda: written() >= before, "a heartbeat that counts the visible rows")
    counted = written()
    cluster.savepoint(live.job_id, live.directory / "savepoints", stop=True)
    after = assert_sequence(live.out)
    assert before <= counted <= after
    cluster.wait_until(
        lambda: _samples(cluster, live, "flink_taskmanager_job_task_numRecordsIn") == [], "the end of the job's series"
    )


def test_progress_reports_count_each_row_once_through_the_kill_of_a_worker(
    cluster: MiniCluster, reader: RestReader, tmp_path: Path
) -> None:
    job = SequenceJob(cluster, tmp_path)
    job.start(rate=400, parallelism=PARALLELISM)
    cluster.wait_for_checkpoints(job.job_id, 2)
    os.kill(cluster.worker_pids(job.job_id)[0], signal.SIGKILL)
    job.restarted(1)
    rows = job.stopped()
    reports = reader.get(f"/jobs/{job.job_id}/progress")["progress"]
    by_sink: dict[str, list[dict[str, Any]]] = {}
    for report in reports:
        by_sink.setdefault(report["sink"]["description"], []).append(report)
    assert len(by_sink) == 2
    for name, own in by_sink.items():
        batches = [report["batchId"] for report in own]
        assert batches == sorted(set(batches))
        assert len(batches) >= 3
        assert sum(report["numInputRows"] for report in own) == rows, name
        assert sum(report["sink"]["numOutputRows"] for report in own) == rows, name
