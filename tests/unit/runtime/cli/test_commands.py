"""Every command against a served application: what it prints, what it does, how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.checkpoint.properties import CheckpointType
from ckpt_runtime.checkpoint.statistics import CheckpointMetrics, SubtaskStats
from ckpt_runtime.cli import run_command, snapshot_commands
from ckpt_runtime.cli.framework import CommandError
from ckpt_runtime.cli.main import main
from ckpt_runtime.configuration.checkpointing_options import PATCHABLE, RecoveryClaimMode
from ckpt_runtime.connect.script import SCRIPT_KEY, SubmittedScript
from ckpt_runtime.failure_report import FailureCause
from ckpt_runtime.jobmaster.event_log import JobAnnouncer
from ckpt_runtime.jobmaster.gateway_values import ExceptionEntry, Precondition, RunRequest, StoredPipeline
from ckpt_runtime.rest.handlers import jobs as handlers
from ckpt_runtime.scheduler.job_effects import StatusChanged
from ckpt_runtime.scheduler.job_events import FailureInfo
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.scheduler.replacement import ParallelismBounds
from tests.unit.runtime.rest import fake_gateway
from tests.unit.runtime.rest.fake_gateway import VERTICES, FakeGateway, graph_of

Capture = pytest.CaptureFixture[str]

JOB = "fa461ac280c9aa36bde4a060aa97618c"
UNKNOWN = "0" * 32
CAUSE = FailureCause("ckpt.Failed", "no room", "ckpt.Failed: no room")
Ckpt = Callable[..., int]


@pytest.fixture
def ckpt(url: str, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ckpt:
    monkeypatch.setenv("CKPT_REST_URL", url)
    monkeypatch.setenv("CKPT_SESSION_FILE", str(tmp_path / "session.json"))
    gateway.add_job(JOB)
    return lambda *arguments: main(arguments)


@pytest.fixture
def pipeline(tmp_path: Path) -> str:
    path = tmp_path / "wordcount.py"
    path.write_text("def main(): ...")
    return str(path)


def test_threads_and_logs_of_all_processes_or_of_a_named_one_are_shown(ckpt: Ckpt, capsys: Capture) -> None:
    assert ckpt("threads", "driver") == 0
    assert capsys.readouterr().out.startswith('"control" Id=7\n\tat ckpt_runtime.task.worker')
    assert ckpt("logs", "0-0") == 0
    assert "INFO ckpt_runtime: a line" in capsys.readouterr().out
    assert ckpt("threads", "--json") == 1
    shown = capsys.readouterr()
    assert list(json.loads(shown.out)) == ["driver", "0-0"]
    assert "0-1: Task manager 0-1 not found" in shown.err
    assert ckpt("logs", "9-9") == 4
    assert "Task manager 9-9 not found" in capsys.readouterr().err


def test_list_shows_active_jobs_and_with_a_all_jobs(ckpt: Ckpt, gateway: FakeGateway, capsys: Capture) -> None:
    gateway.add_job("1" * 32, "done")
    gateway.move("1" * 32, JobStatus.FINISHED)
    assert ckpt("list") == 0
    out = capsys.readouterr().out
    assert JOB in out
    assert "6/6" in out
    assert "done" not in out
    assert ckpt("list", "-a", "--json") == 0
    assert {job["job_id"] for job in json.loads(capsys.readouterr().out)} == {JOB, "1" * 32}
    gateway.jobs.clear()
    assert ckpt("list") == 0
    assert capsys.readouterr().out == "No running jobs.\n"


def test_info_shows_state_checkpoints_settings_and_failures_of_a_job(
    ckpt: Ckpt, gateway: FakeGateway, capsys: Capture
) -> None:
    job = gateway.jobs[JOB]
    _, path = gateway.complete_checkpoint(job)
    job.overrides = CheckpointOverrides(timeout_ms=900_000)
    job.exceptions = [ExceptionEntry(CAUSE, gateway.now, "count (1/2)", "h:1", "a")]
    assert ckpt("info", JOB.upper()) == 0
    out = capsys.readouterr().out
    for part in (JOB, "RUNNING", path, "timeout 15 min 0 s", "checkpointTimeout", "30,742", "ckpt.Failed: no room"):
        assert part in out
    assert ckpt("--json", "info", JOB) == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"]["counts"]["completed"] == 1


@pytest.mark.row("571.9")
def test_info_shows_how_far_pending_checkpoints_have_come(ckpt: Ckpt, gateway: FakeGateway, capsys: Capture) -> None:
    job = gateway.jobs[JOB]
    number = gateway.start_checkpoint(job)
    for index in range(2):
        metrics = CheckpointMetrics(checkpointed_size=1_536)
        job.tracker.report_subtask(number, VERTICES[0], SubtaskStats(index, 5, 0, metrics, completed=not index))
    job.tracker.report_extension(number, 60_000)
    assert ckpt("info", JOB) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Pending:")]
    for part in (f"{number} since", "1 of 6 subtasks", "3.0 KiB persisted", "expires at", "extended by 1 min 0 s"):
        assert part in line


def test_health_shows_the_verdict_with_its_reasons(
    ckpt: Ckpt, gateway: FakeGateway, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "now_ms", lambda: gateway.now)
    job = gateway.jobs[JOB]
    assert ckpt("health", JOB) == 0
    out = capsys.readouterr().out
    for part in ("Health:       DEGRADED", "cannot send for 70%", "State:        RUNNING", "none has ended"):
        assert part in out
    job.tracker.report_failed(gateway.start_checkpoint(job), gateway.now, "Checkpoint expired before completing.")
    assert ckpt("--json", "health", JOB) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["checkpoints"]["success_rate"]) == ("UNHEALTHY", 0.0)
    assert ckpt("health", UNKNOWN) == 4


@pytest.mark.row("203.14")
def test_rescale_sets_the_named_vertices_and_a_number_alone_all_others(
    ckpt: Ckpt, gateway: FakeGateway, capsys: Capture
) -> None:
    def parallelism() -> list[int]:
        return [vertex.parallelism for vertex in gateway.jobs[JOB].graph.vertices]

    assert ckpt("rescale", JOB, "-p", "count=3", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {"job_id": JOB, "parallelism": dict(zip(VERTICES, (2, 3, 2), strict=True))}
    assert parallelism() == [2, 3, 2]
    assert ckpt("rescale", JOB, "-p", f"{VERTICES[2]}=1", "-p", "4") == 0
    assert "     4  count\n     1  sink: Writer\n" in capsys.readouterr().out
    assert parallelism() == [4, 4, 1]
    gateway.rescale_failure = "The job keeps its parallelism: no slots"
    assert ckpt("rescale", JOB, "-p", "2") == 5
    assert "keeps its parallelism: no slots" in capsys.readouterr().err
    assert ckpt("rescale", JOB, "-p", "200") == 2
    assert f"200 for the job vertex {VERTICES[0]} exceeds its maximum parallelism 128" in capsys.readouterr().err
    for wrong, said in (("x=1", "no vertex is 'x'"), ("count=x", "it must be N or VERTEX=N"), ("=1", "VERTEX=N")):
        assert ckpt("rescale", JOB, "-p", wrong) == 2
        assert said in capsys.readouterr().err.replace("\n", " ")
    assert ckpt("rescale", JOB) == 2
    assert parallelism() == [4, 4, 1]


@pytest.mark.row("203.14")
def test_vertices_that_are_not_named_keep_their_bounds(ckpt: Ckpt, gateway: FakeGateway, capsys: Capture) -> None:
    """With as many slots as there are: the upper bound alone would ask for more than that."""
    gateway.slots_for_rescale = 3
    asyncio.run(gateway.update_resource_requirements(JOB, dict.fromkeys(VERTICES, ParallelismBounds(1, 8))))
    assert ckpt("rescale", JOB, "-p", "count=2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["parallelism"] == dict(zip(VERTICES, (3, 2, 3), strict=True))
    declared = gateway.jobs[JOB].resource_requirements()
    assert [(its.lower, its.upper) for its in declared.values()] == [(1, 8), (2, 2), (1, 8)]


def test_cancel_waits_for_the_end_and_conflicts_with_a_finished_job(
    ckpt: Ckpt, gateway: FakeGateway, capsys: Capture
) -> None:
    assert ckpt("cancel", JOB, "--wait", "--wait-timeout", "10 s") == 0
    assert gateway.jobs[JOB].status is JobStatus.CANCELED
    assert "is canceled" in capsys.readouterr().out
    gateway.add_job("1" * 32)
    gateway.move("1" * 32, JobStatus.FINISHED)
    assert ckpt("cancel", "1" * 32) == 5


@pytest.mark.parametrize("command", [("cancel", JOB), ("cancel", JOB, "--retain"), ("stop", JOB, "-p", "/s")])
def test_a_stop_names_the_incarnation_that_it_means(
    ckpt: Ckpt, gateway: FakeGateway, capsys: Capture, command: tuple[str, ...]
) -> None:
    assert ckpt(*command, "--incarnation", "0") == 2
    assert gateway.conditions == []
    assert ckpt(*command, "--incarnation", "3") == 0
    assert gateway.conditions == [Precondition(incarnation=3)]


def test_a_program_is_held_and_released_by_its_owner(ckpt: Ckpt, gateway: FakeGateway, capsys: Capture) -> None:
    program = StoredPipeline("0" * 32 + "_p", "job.py", gateway.now)
    gateway.pipelines[program.id] = program
    assert ckpt("program", "hold", program.id, "--owner", "me") == 0
    assert ckpt("program", "list") == 0
    assert "me" in capsys.readouterr().out.splitlines()[-1]
    assert ckpt("program", "release", program.id, "--owner", "me") == 0
    assert gateway.pipelines[program.id].holds == {}


def test_cancel_with_retain_names_the_retained_checkpoint(ckpt: Ckpt, gateway: FakeGateway, capsys: Capture) -> None:
    gateway.complete_checkpoint(gateway.jobs[JOB])
    assert ckpt("cancel", JOB, "--retain", "--wait", "--wait-timeout", "10 s") == 0
    assert "Retained: file:" in capsys.readouterr().out
    gateway.add_job("1" * 32)
    assert ckpt("--json", "cancel", "1" * 32, "--retain") == 0
    assert json.loads(capsys.readouterr().out) == {"job_id": "1" * 32, "retained_checkpoint": None}


@pytest.mark.row("203.1")
@pytest.mark.parametrize(
    ("option", "written"), [("native", "NATIVE"), ("canonical", "CANONICAL"), ("CANONICAL", "CANONICAL")]
)
def test_savepoint_and_stop_print_the_paths_of_the_wanted_format(
    ckpt: Ckpt, gateway: FakeGateway, capsys: Capture, option: str, written: str
) -> None:
    assert ckpt("savepoint", JOB, "/s", "--type", option) == 0
    first = capsys.readouterr().out.strip()
    assert ckpt("stop", JOB, "-p", "/s", "--drain", "--type", option) == 0
    second = capsys.readouterr().out.strip()
    history = gateway.jobs[JOB].tracker.snapshot().history
    assert [(item.external_path, item.savepoint_format) for item in history] == [(second, written), (first, written)]
    assert gateway.jobs[JOB].status is JobStatus.FINISHED


@pytest.mark.row("203.8")
def test_a_savepoint_says_how_it_was_made(ckpt: Ckpt, gateway: FakeGateway, capsys: Capture) -> None:
    assert ckpt("savepoint", JOB, "/s") == 0
    assert "full: 600 B written" in capsys.readouterr().err
    assert ckpt("savepoint", JOB, "/s", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [document[name] for name in ("incremental", "checkpointed_size", "reused_size")] == [False, 600, 0]


def test_savepoint_command_shows_the_progress(ckpt: Ckpt, gateway: FakeGateway, capsys: Capture) -> None:
    job = gateway.jobs[JOB]
    number = gateway.start_checkpoint(job, CheckpointType.SAVEPOINT, "NATIVE")
    metrics = CheckpointMetrics(checkpointed_size=1 << 20, reused_size=2 << 20)
    job.tracker.report_subtask(number, VERTICES[0], SubtaskStats(0, 5, 0, metrics, completed=False))
    assert ckpt("savepoint", JOB, "/s") == 0
    assert "taking a savepoint: 0 of 6 subtasks, 3.0 MiB so far" in capsys.readouterr().err


def test_a_savepoint_is_disposed_of_once_and_without_a_job(ckpt: Ckpt, gateway: FakeGateway, capsys: Capture) -> None:
    assert ckpt("savepoint", "-d", "file:/s/one") == 0
    assert gateway.disposed == ["file:/s/one"]
    assert ckpt("savepoint", "-d", "file:/s/one") == 1
    assert "gone" in capsys.readouterr().err
    assert ckpt("savepoint", JOB, "-d", "file:/s/one") == 2
    assert ckpt("savepoint") == 2


def test_checkpoint_waits_and_prints_the_id_or_the_failure(ckpt: Ckpt, gateway: FakeGateway, capsys: Capture) -> None:
    assert ckpt("checkpoint", JOB, "--full") == 0
    assert "Checkpoint 1 is completed." in capsys.readouterr().out
    assert ckpt("checkpoint", JOB, "--json") == 0
    assert json.loads(capsys.readouterr().out)["checkpoint_id"] == 2
    gateway.savepoint_failure = CAUSE
    assert ckpt("checkpoint", JOB) == 1
    assert capsys.readouterr().err.endswith("ckpt: no room\n")


def test_detached_operations_print_their_trigger_id(ckpt: Ckpt, gateway: FakeGateway, capsys: Capture) -> None:
    for arguments in (
        ("checkpoint", JOB),
        ("savepoint", JOB, "/s"),
        ("savepoint", "-d", "/s/x"),
        ("stop", JOB, "-p", "/s"),
    ):
        assert ckpt(*arguments, "--detached") == 0
        assert capsys.readouterr().out.strip() in gateway.operations


@pytest.mark.row("571.1")
@pytest.mark.row("571.8")
def test_patch_checkpoint_config_changes_what_its_options_name(
    ckpt: Ckpt, gateway: FakeGateway, capsys: Capture
) -> None:
    command = ("patch-checkpoint-config", JOB)
    assert ckpt(*command, "--timeout", "15 min") == 0
    assert gateway.jobs[JOB].overrides == CheckpointOverrides(timeout_ms=900_000)
    assert "15 min 0 s" in capsys.readouterr().out
    assert ckpt(
        *command, "--interval", "10s", "--min-pause", "0", "--max-concurrent", "2",
        "--tolerable-failed-checkpoints", "3", "--aligned-timeout", "1500ms", "--unaligned",
        "--max-inflight-data", "64 mb",
    ) == 0  # fmt: skip
    assert gateway.jobs[JOB].overrides == CheckpointOverrides(
        interval_ms=10_000, timeout_ms=900_000, min_pause_ms=0, max_concurrent=2, tolerable_failed_checkpoints=3,
        aligned_timeout_ms=1500, unaligned_enabled=True, max_inflight_data_bytes=64 << 20,
    )  # fmt: skip
    assert len(gateway.jobs[JOB].overrides.given) == len(PATCHABLE), "an option for each setting"
    assert ckpt(*command, "--reset") == 0
    assert gateway.jobs[JOB].overrides == CheckpointOverrides()


@pytest.mark.parametrize(
    "arguments",
    [
        (), ("--reset", "--interval", "1 s"), ("--interval", "0 s"), ("--interval", "-1"), ("--interval", "ten"),
        ("--interval", "1.5 s"), ("--max-concurrent", "x"), ("--max-concurrent", "0"), ("--max-inflight-data", "1 z"),
        ("--nosuch", "1"),
    ],
)  # fmt: skip
def test_patches_that_are_refused(ckpt: Ckpt, gateway: FakeGateway, arguments: tuple[str, ...]) -> None:
    assert ckpt("patch-checkpoint-config", JOB, *arguments) == 2
    assert gateway.jobs[JOB].overrides == CheckpointOverrides()


def test_run_detached_passes_everything_on(ckpt: Ckpt, gateway: FakeGateway, capsys: Capture, pipeline: str) -> None:
    assert ckpt(
        "run", "-d", "-s", "s3://b/s", "-n", "--claim-mode", "claim", "-p", "3", "-D", "a=1", "-D", "b=x=y",
        "-c", "wordcount:main", "--job-id", "AB" * 16, pipeline, "--input", "x", "-d", "--", "--json",
    ) == 0  # fmt: skip
    assert capsys.readouterr().out == "ab" * 16 + "\n"
    (stored,) = gateway.pipelines
    assert gateway.jobs["ab" * 16].request == RunRequest(
        stored, "wordcount:main", ("--input", "x", "-d", "--", "--json"), 3, {"a": "1", "b": "x=y"}, "s3://b/s", True,
        RecoveryClaimMode.CLAIM, "ab" * 16,
    )  # fmt: skip


@pytest.mark.parametrize(("end", "code"), [(JobStatus.FINISHED, 0), (JobStatus.CANCELED, 1), (JobStatus.FAILED, 1)])
def test_run_attached_ends_as_the_job_ends(
    ckpt: Ckpt, gateway: FakeGateway, capsys: Capture, pipeline: str, end: JobStatus, code: int
) -> None:
    gateway.end_of_new_jobs = end
    job = "ab" * 16
    original = gateway.add_job

    def failing(job_id: str, name: str = "") -> object:
        added = original(job_id, name)
        added.exceptions = [ExceptionEntry(CAUSE, gateway.now)]
        return added

    gateway.add_job = failing  # type: ignore[assignment,method-assign]
    assert ckpt("run", "--job-id", job, pipeline) == code
    captured = capsys.readouterr()
    assert captured.out == f"Job {job} {end.value}\n"
    assert "RUNNING" in captured.err
    assert ("no room" in captured.err) == (end is JobStatus.FAILED)


def test_plans_that_a_program_explains_are_shown_by_run_and_plan(
    ckpt: Ckpt, capsys: Capture, monkeypatch: pytest.MonkeyPatch, pipeline: str
) -> None:
    text = "== Plan of the frame, output mode append ==\n(1) source json, no uid, parallelism 1"
    monkeypatch.setattr(fake_gateway, "graph_of", lambda name: replace(graph_of(name), explained=(text,)))
    assert ckpt("run", "-d", pipeline) == 0
    assert text in capsys.readouterr().err
    assert ckpt("plan", pipeline) == 0
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-s", "/savepoint"], "--from-savepoint: it cannot be given together with --client"),
        (["--claim-mode", "claim"], "--claim-mode claim: it cannot be given"),
        (["--fork"], "--fork: it cannot be given"),
        (["--job-id", JOB], "--job-id: it cannot be given"),
        (["-D", "execution.checkpointing.interval"], "it must be key=value"),
    ],
)
def test_options_of_one_job_are_refused_for_a_script_that_runs_as_a_client(
    ckpt: Ckpt, capsys: Capture, pipeline: str, arguments: list[str], message: str
) -> None:
    assert ckpt("run", "--client", *arguments, pipeline) == 2
    assert message in capsys.readouterr().err


@pytest.mark.row("ps.9")
def test_script_is_not_run_as_a_client_if_pyspark_cannot_connect(
    ckpt: Ckpt, gateway: FakeGateway, capsys: Capture, pipeline: str, tmp_path: Path
) -> None:
    assert ckpt("run", "--client", str(tmp_path)) == 2
    assert f"{tmp_path} is not a file of Python" in capsys.readouterr().err
    assert ckpt("run", "--client", pipeline) == 5
    assert "start the session with -D connect.enabled=true" in capsys.readouterr().err
    gateway.connect_port = 1
    assert ckpt("--insecure", "run", "--client", pipeline) == 2
    assert "--insecure: PySpark always checks the certificate" in capsys.readouterr().err


@pytest.mark.row("ps.9")
@pytest.mark.parametrize(
    ("url", "token", "address", "metadata"),
    [
        ("http://127.0.0.1:81", "a=b;", "localhost:5", {"token": "a=b;"}),
        ("http://[::1]:81", None, "localhost:5", {}),
        ("http://10.0.0.1:81", None, "10.0.0.1:5", {}),
        ("https://127.0.0.1:81", "t", "127.0.0.1:5", {"token": "t", "use_ssl": "true"}),
        ("https://[fd00::1]:81", None, "[fd00::1]:5", {"use_ssl": "true"}),
    ],
)
def test_pyspark_reads_the_address_and_the_options_of_a_script_that_runs_as_a_client(
    url: str, token: str | None, address: str, metadata: dict[str, str]
) -> None:
    from pyspark.sql.connect.client.core import DefaultChannelBuilder

    script = SubmittedScript("an id", "module", ["one; two=3 %"], {"a.key": "é"})
    builder = DefaultChannelBuilder(run_command.connect_address(url, 5, token, script))
    assert builder.endpoint == address
    given = dict(builder._params)
    assert msgspec.json.decode(given.pop(SCRIPT_KEY), type=SubmittedScript) == script
    assert given == metadata
    assert dict(builder.metadata()).keys() == {SCRIPT_KEY}


def test_script_does_not_run_as_a_client_where_pyspark_would_not_send_the_token() -> None:
    with pytest.raises(CommandError, match=r"not to 10\.0\.0\.1: set security\.ssl\.rest\.enabled"):
        run_command.connect_address("http://10.0.0.1:81", 5, "secret", SubmittedScript())


def test_interrupting_an_attached_run_leaves_the_job(
    request: pytest.FixtureRequest,
    ckpt: Ckpt,
    gateway: FakeGateway,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    pipeline: str,
) -> None:
    def interrupting(*_: object, **__: object) -> str:
        """Called for a progress line, in the thread of the client: the user presses Ctrl-C."""
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return "interrupted"

    monkeypatch.setattr(run_command, "_progress_text", interrupting)
    monkeypatch.setattr(snapshot_commands.StartedOperation, "_so_far", interrupting)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    assert ckpt("run", "--job-id", "ab" * 16, pipeline) == 130
    assert f"Job {'ab' * 16} keeps running" in capsys.readouterr().err
    assert gateway.jobs["ab" * 16].status is JobStatus.RUNNING
    assert ckpt("savepoint", JOB, "/s") == 130
    assert "the savepoint continues as operation" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("nosuch.py",), ("-p", "0", "{p}"), ("-D", "novalue", "{p}"), ("-D", "a=1", "-D", "a=2", "{p}"),
        ("--nosuch", "{p}"),
        ("-c", "nocolon", "{p}"), ("--job-id", "x", "{p}"), ("-s", "relative", "{p}"), ("-D", "bad.option=1", "{p}"),
        ("-s", "/nope", "{p}"), (),
    ],
)  # fmt: skip
def test_runs_that_are_refused(ckpt: Ckpt, gateway: FakeGateway, pipeline: str, arguments: tuple[str, ...]) -> None:
    assert ckpt("run", "-d", *(argument.replace("{p}", pipeline) for argument in arguments)) == 2
    assert list(gateway.jobs) == [JOB]


def test_a_wait_that_takes_too_long(ckpt: Ckpt, gateway: FakeGateway, capsys: Capture) -> None:
    gateway.polls_until_done = 10**9
    assert ckpt("checkpoint", JOB, "--wait-timeout", "50 ms") == 7
    assert "did not happen within 0.05 s" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["info", "cancel", "checkpoint", "stop", "savepoint"])
def test_unknown_and_malformed_jobs(ckpt: Ckpt, capsys: Capture, command: str) -> None:
    assert ckpt(command, UNKNOWN) == 4
    assert "Traceback" not in capsys.readouterr().err
    for bad in ("x", JOB[:-1], "\udcff" * 32, "../" + JOB):
        assert ckpt(command, bad) == 2


def test_errors_are_json_objects_with_the_exit_code_if_json_is_wanted(ckpt: Ckpt, capsys: Capture) -> None:
    assert ckpt("info", UNKNOWN, "--json") == 4
    captured = capsys.readouterr()
    assert json.loads(captured.err) == {"error": f"Job {UNKNOWN} not found", "exit_code": 4}
    assert captured.out == ""


def test_wrong_texts_and_missing_commands_are_usage_errors(ckpt: Ckpt, gateway: FakeGateway, capsys: Capture) -> None:
    assert ckpt("savepoint", JOB, "/dir\udcff") == 2
    assert ckpt("run", "-d", "\udcff.py") == 2
    assert not gateway.operations
    assert ckpt() == 2
    assert ckpt("nosuch") == 2
    assert ckpt("--help") == 0
    assert "patch-checkpoint-config" in capsys.readouterr().out


def test_plan_shows_how_a_snapshot_fits_and_starts_nothing(
    ckpt: Ckpt, gateway: FakeGateway, capsys: Capture, pipeline: str
) -> None:
    before = set(gateway.jobs)
    assert ckpt("plan", "-s", "/data/s", "-n", "-p", "3", "-D", "a=1", "-c", "wordcount:main", pipeline, "--x") == 0
    captured = capsys.readouterr()
    assert "count     matched   1 -> 2       128\n" in captured.out
    assert "old       dropped   1 -> -       128 -> -\n" in captured.out
    assert "aggregates  matched  key.word: string, count: int64\n" in captured.out
    assert "/data/s fits" in captured.err
    (request,) = gateway.planned
    assert (request.arguments, request.parallelism, request.savepoint_path) == (("--x",), 3, "/data/s")
    assert set(gateway.jobs) == before


def test_plan_ends_with_1_when_the_snapshot_would_be_refused(ckpt: Ckpt, capsys: Capture, pipeline: str) -> None:
    assert ckpt("plan", "-s", "/data/refused", pipeline) == 1
    assert "refused: state 'aggregates' of operator 'count': no" in capsys.readouterr().err
    assert ckpt("--json", "plan", "-s", "/data/refused", pipeline) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["restore"]["fits"]
    assert [state["verdict"] for state in found["restore"]["states"]] == ["refused", "dropped"]
    assert ckpt("plan", pipeline) == 0
    assert "sink: Writer  2" in capsys.readouterr().out


def test_events_prints_a_line_for_each_until_the_named_jobs_end(
    ckpt: Ckpt, gateway: FakeGateway, capsys: Capture
) -> None:
    """One line for each, up to the end of the jobs that were named."""
    announcer = JobAnnouncer(JOB, gateway.events.publish)
    job = gateway.jobs[JOB]
    gateway.complete_checkpoint(job)
    announcer.checkpoint(job.tracker.snapshot().history[0])
    announcer.announce(StatusChanged(JobStatus.FAILED, 1, FailureInfo("ValueError", "why\nmore")))
    assert ckpt("events", JOB.upper(), "--after", gateway.events.event_id(0)) == 0
    start, checkpoint, failed = capsys.readouterr().out.splitlines()
    assert "start" in start
    assert "checkpoint-completed  1 in 6 ms, 600 B written: file:/data/chk-1" in checkpoint
    assert "job-status  FAILED ValueError: why" in failed
    assert ckpt("events", JOB, "--after", gateway.events.event_id(1), "--json") == 0
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(found["type"], found["id"].rpartition("-")[2]) for found in documents] == [
        ("start", "1"),
        ("job-status", "2"),
    ]
    gateway.move(JOB, JobStatus.FINISHED)
    assert ckpt("events", JOB) == 0
    assert ckpt("events", UNKNOWN) == 4
    assert ckpt("events", "nonsense") == 2
