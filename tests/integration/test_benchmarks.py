"""The benchmarks run and print the keys they promise. What they measure on a busy machine is not looked at."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks import backpressure
from benchmarks.harness import BenchmarkSession
from benchmarks.shuffle_run import PIPELINE, drain_and_check
from ckpt_runtime.client.clients import CkptClient

ROOT = Path(__file__).resolve().parents[2]
COMMON_KEYS = {"name", "options", "python", "pyspark", "cores", "peak_rss_mb"}
NAMES = (
    "backpressure",
    "checkpoint_cost",
    "coordinator",
    "downtime",
    "end_of_data",
    "etl",
    "expressions",
    "keyed_count",
    "keyed_process",
    "keyed_vector",
    "latency",
    "patch",
    "peers",
    "planning",
    "progress",
    "recovery",
    "savepoint",
    "scale",
    "sink",
    "spark_peer",
    "state_processor",
    "triggers",
    "windows",
)
COMMANDS = (
    "keyed_count --keys 100000 --key int|scattered|string --parallelism 2 --seconds 20 --backend memory|rocksdb",
    "keyed_process --keys 100000 --parallelism 2 --seconds 20 --interval-ms 1000 --backend memory|rocksdb",
    "keyed_vector --keys 100000 --parallelism 2 --seconds 20 --interval-ms 1000 --backend memory|rocksdb",
    "patch --seconds 20",
    "recovery --kills 10 --what worker|agent",
    "backpressure --sleep-ms 0|0.01|0.1|1 --policy none|aligned|unaligned|timeout --parallelism 4 --payload 100",
    "backpressure --all --plot DIR",
    "progress --policy aligned|unaligned|timeout --fail-every-s 5 --minutes 2",
    "savepoint --state-mb 1000 --change 0.01 --value-bytes 500 --backend rocksdb|memory",
    "downtime --kind config|rescale|savepoint-resume|slot|executor|driver --state-mb 0|1000",
    "coordinator --subtasks 100,1000,10000",
    "end_of_data --sink parquet|postgres",
    "sink --sink parquet|postgres|delta|foreachBatch --seconds 20",
    "etl --rows 20000000 --spark",
    "latency --rows-per-s 1000|100000 --buffer-timeout 100ms --flink-dir DIR",
    "triggers --waiting 500",
    "expressions --rows 20000000 --spark",
    "windows --rows 20000000 --keys 100000 --spark",
    "planning --operators 10",
    "scale --subtasks 10,100,1000",
    "state_processor --state-mb 1000 --format native|canonical",
)
"""What people run; alternatives stand side by side. Nexmark is left out: its imports take seconds."""
SMALL_TOPOLOGY = ("--parallelism", "2", "--interval-ms", "200", "--conf", "taskmanager.network.buffer.max-rows=256")
"""Few rows under way: an aligned checkpoint behind a sleeping map takes tenths of a second."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "runtime"), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )


def measured(*arguments: str) -> tuple[dict[str, Any], str]:
    """The line of JSON that a benchmark prints, and what it says on stderr."""
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line), done.stderr


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_keyed_count_measures_and_checks_itself() -> None:
    document, said = measured(
        "benchmarks.keyed_count", "--seconds", "2", "--keys", "5000", "--key", "string", "--interval-ms", "200"
    )
    assert set(document) == COMMON_KEYS | {
        "rows_per_s",
        "checkpoints",
        "checkpoint_ms_p50",
        "checkpoint_ms_p95",
        "checkpoint_ms_max",
        "sync_ms_p99",
        "checkpoint_bytes_p50",
        "state_bytes_per_key",
    }
    assert document["rows_per_s"] > 0
    assert document["peak_rss_mb"] > 0
    assert document["state_bytes_per_key"] > 0
    assert document["options"]["keys"] == 5000
    assert "every count and sum is right" in said


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.spark
@pytest.mark.row("571.2")
@pytest.mark.timeout(600)
def test_patch_measures_and_checks_itself() -> None:
    document, said = measured("benchmarks.patch", "--seconds", "2")
    assert set(document) == COMMON_KEYS | {
        "effective_ms_p50",
        "effective_ms_p95",
        "dip_percent",
        "dip_error_percent",
        "driver_cpu_percent",
        "patches",
        "rows_per_s_quiet",
    }
    assert document["patches"] == 10
    assert 0 < document["effective_ms_p50"] <= document["effective_ms_p95"]
    assert "every count and sum is right" in said


@pytest.mark.slow
@pytest.mark.row("76.10")
@pytest.mark.timeout(600)
def test_backpressure_is_measured_on_a_job_whose_rows_are_checked(
    client: CkptClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the session of the folder; only the memory and the spares are looked up by the process of a session."""
    options = Namespace(policy="aligned", seconds=1.0, interval_ms=200, wait_s=120.0)
    session = BenchmarkSession(cast(Any, None), client, tmp_path, cast(Any, None))
    configuration = {
        "restart-strategy.type": "none",
        "execution.checkpointing.interval": f"{backpressure.OFF_MS} ms",
        "taskmanager.network.buffer.max-rows": "256",
    }
    job = session.run(PIPELINE, [0.01, 100], 2, configuration)
    job.wait_for_rows()
    measures = backpressure.watch(job, options).measures()
    drain_and_check(job)
    assert measures["rows_per_s"] > 0
    assert measures["checkpoints"] > 0
    assert 0 < measures["checkpoint_ms_p50"] <= measures["checkpoint_ms_p95"] <= measures["checkpoint_ms_max"]
    assert measures["censored"] is False
    assert measures["persisted_inflight_bytes_p50"] == 0
    assert "each has come exactly once" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.spark
@pytest.mark.row("76.10")
@pytest.mark.timeout(600)
def test_backpressure_measures_and_checks_itself() -> None:
    document, said = measured(
        "benchmarks.backpressure", "--policy", "aligned", "--sleep-ms", "0.01", "--seconds", "2", *SMALL_TOPOLOGY
    )
    assert set(document) == COMMON_KEYS | {
        "rows_per_s",
        "checkpoints",
        "checkpoint_ms_p50",
        "checkpoint_ms_p95",
        "checkpoint_ms_max",
        "censored",
        "checkpointed_bytes_p50",
        "persisted_inflight_bytes_p50",
        "queued_bytes_max",
    }
    assert document["rows_per_s"] > 0
    assert document["checkpoints"] > 0
    assert 0 < document["checkpoint_ms_p50"] <= document["checkpoint_ms_p95"] <= document["checkpoint_ms_max"]
    assert document["censored"] is False
    assert document["persisted_inflight_bytes_p50"] == 0
    assert "each has come exactly once" in said


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.row("76.10")
@pytest.mark.timeout(600)
def test_progress_measures_and_checks_itself() -> None:
    times = ("--minutes", "0.12", "--fail-every-s", "3", "--sleep-ms", "0.01")
    document, said = measured("benchmarks.progress", *times, *SMALL_TOPOLOGY)
    assert set(document) == COMMON_KEYS | {
        "useful_rows_per_min",
        "recoveries",
        "completed_checkpoints",
        "positions_advanced",
    }
    assert document["useful_rows_per_min"] > 0
    assert document["recoveries"] > 0
    assert document["completed_checkpoints"] > 0
    assert document["positions_advanced"] == f"{document['recoveries']} of {document['recoveries']}"
    assert "each has come exactly once" in said


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_savepoint_measures_and_checks_itself() -> None:
    document, said = measured("benchmarks.savepoint", "--state-mb", "5", "--window-s", "1")
    times = {"incremental_s", "native_s", "canonical_s"}
    restores = {"restore_native_s", "restore_canonical_s", "restore_checkpoint_s"}
    sizes = {"incremental_bytes", "native_bytes_written", "canonical_bytes"}
    assert set(document) == COMMON_KEYS | times | restores | sizes | {
        "sync_ms_p99",
        "rows_per_s_none",
        "rows_per_s_during",
        "cpu_us_per_row_none",
        "cpu_us_per_row_during",
    }
    # The values are pieces of the same 4 MB of random bytes, of which a file has each once.
    assert document["canonical_bytes"] > 3_000_000
    assert "went on from canonical" in said


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.spark
@pytest.mark.row("147.4")
@pytest.mark.timeout(600)
def test_end_of_data_measures_and_checks_itself() -> None:
    document, _ = measured("benchmarks.end_of_data", "--rows", "200000", "--rounds", "1", "--interval-ms", "300")
    tails = {"tail_s_with", "tail_s_without"}
    rates = {"exactly_once_rows_per_s", "at_least_once_rows_per_s"}
    assert set(document) == COMMON_KEYS | tails | rates
    assert all(document[key] > 0 for key in tails | rates)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.spark
@pytest.mark.row("203.9")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ["native", "canonical"])
def test_state_processor_measures_and_checks_itself(form: str) -> None:
    document, said = measured("benchmarks.state_processor", "--state-mb", "5", "--format", form)
    rates = {"read_rows_per_s", "write_rows_per_s"}
    assert set(document) == COMMON_KEYS | rates
    assert all(document[key] > 0 for key in rates)
    assert "continued from what Spark wrote" in said


def test_coordinator_reads_back_what_it_wrote() -> None:
    document, _ = measured("benchmarks.coordinator", "--subtasks", "10,40", "--shared-files", "200")
    assert set(document) == COMMON_KEYS | {"runs"}
    assert [run["subtasks"] for run in document["runs"]] == [10, 40]
    times = {"ack_s", "cpu_s", "metadata_write_s", "decode_s", "register_s", "recovery_s"}
    assert all(set(run) == times | {"subtasks", "memory_mb", "metadata_bytes"} for run in document["runs"])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_planning_measures_its_parts_and_compares_both_graphs() -> None:
    document, _ = measured("benchmarks.planning", "--operators", "6", "--rounds", "1")
    assert set(document) == COMMON_KEYS | {"plan_ms_p50", "plan_ms_max", "capture_ms", "analysis_ms", "mapping_ms"}
    assert document["plan_ms_p50"] > 0 < document["analysis_ms"]


def test_scale_measures_each_number_of_subtasks() -> None:
    document, _ = measured("benchmarks.scale", "--subtasks", "4,10", "--seconds", "1.2")
    assert set(document) == COMMON_KEYS | {"runs"}
    assert [run["subtasks"] for run in document["runs"]] == [4, 10]
    planned = {"subtasks", "plan_deployments_s", "encode_s", "message_bytes", "restart_message_bytes"}
    keys = planned | {"driver_cpu", "driver_mb", "rest_ms_p95"}
    assert all(set(run) == keys for run in document["runs"])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.airflow
@pytest.mark.row("air.11")
@pytest.mark.timeout(600)
def test_triggers_measures_and_checks_itself() -> None:
    sizes = ("--waiting", "30", "--few", "3", "--seconds", "1", "--rounds", "2")
    document, said = measured("benchmarks.triggers", *sizes)
    of_each = {"cpu_percent", "cpu_percent_quiet", "rss_mb", "latency_s_p50", "latency_s_p95", "blocked"}
    of_waits = of_each | {"requests_per_s", "requests_per_s_quiet"}
    assert set(document) == COMMON_KEYS | of_waits | {
        *(f"{key}_floor" for key in of_each),
        *(f"{key}_few" for key in of_waits),
        "latency_beyond_floor_s_p50",
        "latency_beyond_floor_s_p95",
        "streams",
        "completions",
    }
    assert (document["streams"], document["completions"]) == (1, 30)
    assert 0 < document["latency_s_p50"] <= document["latency_s_p95"]
    assert document["requests_per_s"] > 0
    assert "many: 30 tasks wait" in said


class Parsed(Exception):
    """The command line is right; what would follow is left out."""


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = ArgumentParser.parse_args

    def stop(parser: ArgumentParser) -> None:
        raise Parsed(parse(parser))

    monkeypatch.setattr(ArgumentParser, "parse_args", stop)
    name, *parts = command.split()
    alternatives = [part.split("|") for part in parts]
    main = importlib.import_module(f"benchmarks.{name}").main
    for number in range(max(map(len, alternatives))):
        arguments = [values[number % len(values)] for values in alternatives]
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(Parsed):
            main()


@pytest.mark.parametrize("name", NAMES)
def test_help_names_the_benchmark(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As its command would, but here, where what it imports is imported once for all of them."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 0
    assert f"benchmarks.{name}" in capsys.readouterr().out
