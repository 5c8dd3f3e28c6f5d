"""The provider inside a real Airflow, with real jobs: deferral, kill, retry, clear, the delivered DAGs and pages."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from ckpt_runtime.jobmaster.leadership import LeaseSignature
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.snapshots.catalogue import list_savepoints
from ckpt_runtime.storage.ha_store import HaStore
from demo.airflow_api import DagRun
from demo.airflow_instance import LocalAirflow
from tests.support.axe import findings
from tests.support.browser import PATIENCE_MS, chromium, open_browser, visit
from tests.support.jobs import SequenceJob, program_of
from tests.system.airflow_instance import until, wait_state
from tests.system.conftest import SLOWLY, TOKEN, Session, every_second
from tests.system.pages_in_airflow import guarded_connection, visits

pytestmark = [pytest.mark.airflow, pytest.mark.slow, pytest.mark.timeout(600)]


def begin_held(job: SequenceJob) -> int:
    """Starts a job whose user code stands still after a completed checkpoint, whose id is returned."""
    job.start(**SLOWLY, configuration=every_second(execution__checkpointing__timeout="2 h"))
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    job.hold("processor")
    latest = job.cluster.of_job(job.job_id, lambda job: job.checkpoint_statistics()).latest_completed
    assert latest is not None
    return latest.id


@pytest.fixture
def held(job: SequenceJob) -> SequenceJob:
    """A job with a completed checkpoint whose user code lets no other one complete."""
    begin_held(job)
    return job


@dataclass(frozen=True)
class Waiting:
    """Runs whose tasks wait in the triggerer for a job that is held up, and its latest checkpoint."""

    job: SequenceJob
    latest_checkpoint: int
    savepoint: DagRun
    sensor: DagRun


@pytest.fixture(scope="module")
def waiting(airflow: LocalAirflow, session: Session, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Waiting]:
    """The last test that uses it releases the job."""
    job = SequenceJob(session.cluster, tmp_path_factory.mktemp("waiting"))
    latest = begin_held(job)
    found = Waiting(job, latest, trigger(airflow, "system_savepoint", job), trigger(airflow, "system_sensor", job))
    wait_state(airflow, found.savepoint, "savepoint", "deferred")
    wait_state(airflow, found.sensor, "checkpoint", "deferred")
    yield found
    job.release("processor")
    job.end()


def trigger(airflow: LocalAirflow, dag_id: str, job: SequenceJob) -> DagRun:
    return airflow.trigger_dag(dag_id, {"job_id": job.job_id, "directory": str(job.directory)})


def savepoints(job: SequenceJob) -> list[str]:
    return [path.as_uri() for path in (job.directory / "savepoints").iterdir()]


@pytest.mark.row("air.3")
def test_clearing_a_waiting_task_keeps_its_job_and_marking_it_failed_cancels_it(
    airflow: LocalAirflow, session: Session, job: SequenceJob
) -> None:
    """Each says what became of the job."""

    def its_trigger_runs(number: int) -> bool:
        """Airflow can notify no task before."""
        return "starting" in airflow.api.task_log(run, "submit", number).rpartition("trigger ")[2]

    known = session.jobs()
    run = trigger(airflow, "system_submit", job)
    wait_state(airflow, run, "submit", "deferred")
    job.job_id = session.job_after(known)
    job.running()
    until(lambda: its_trigger_runs(1), "the trigger of the first try")
    airflow.api.clear_task(run, "submit")
    words = f"job {job.job_id} was not cancelled and keeps running"
    until(lambda: words in airflow.api.task_log(run, "submit"), "a word in the log of the first try")
    until(lambda: airflow.api.task_instances(run)[0]["try_number"] == 2, "the second try")
    wait_state(airflow, run, "submit", "deferred")
    until(lambda: its_trigger_runs(2), "the trigger of the second try")
    assert airflow.api.xcom(run, "submit", "job_id") == job.job_id
    airflow.api.set_task_state(run, "submit", "failed")
    job.cluster.wait_for_status(job.job_id, JobStatus.CANCELED)
    words = f"job {job.job_id} is being cancelled"
    until(lambda: words in airflow.api.task_log(run, "submit", 2), "a word in the log of the second try")
    assert session.jobs() - known == {job.job_id}


@pytest.mark.long
@pytest.mark.row("air.3")
def test_a_retry_resumes_from_the_latest_checkpoint_and_a_cleared_success_runs_again(
    airflow: LocalAirflow, session: Session, job: SequenceJob
) -> None:
    def restored() -> str | None:
        found = job.cluster.of_job(job.job_id, lambda job: job.checkpoint_statistics()).latest_restored
        return None if found is None else found.external_path

    def next_job() -> str:
        job.job_id = session.job_after(known)
        known.add(job.job_id)
        return job.job_id

    known = session.jobs()
    run = trigger(airflow, "system_resume", job)
    first = next_job()
    wait_state(airflow, run, "submit", "deferred")
    job.running()
    job.has_output()
    job.inject("processor-raise")
    next_job()
    job.stopped()
    assert airflow.wait_run(run, 390) == "success", airflow.failure_report(run)
    path = restored()
    assert path is not None
    assert f"/{first}/chk-" in path
    airflow.api.clear_task(run, "submit")
    next_job()
    job.running()
    job.cluster.savepoint(job.job_id, job.directory / "again", stop=True)
    assert airflow.wait_run(run, 390) == "success", airflow.failure_report(run)
    assert restored() is None


@pytest.mark.long
@pytest.mark.row("air.3")
def test_clearing_a_waiting_task_does_not_double_the_operation(airflow: LocalAirflow, held: SequenceJob) -> None:
    run = trigger(airflow, "system_savepoint", held)
    wait_state(airflow, run, "savepoint", "deferred")
    airflow.api.clear_task(run, "savepoint")
    until(lambda: airflow.api.task_instances(run)[0]["try_number"] == 2, "the second try")
    wait_state(airflow, run, "savepoint", "deferred")
    held.release("processor")
    assert airflow.wait_run(run, 390) == "success", airflow.failure_report(run)
    assert len(savepoints(held)) == 1


@pytest.mark.row("air.1")
def test_connection_form_has_address_and_directory_and_its_test_names_the_leader(
    airflow: LocalAirflow, session: Session, tmp_path: Path
) -> None:
    kinds = airflow.api.call("GET", f"{airflow.base_url}/ui/connections/hook_meta")
    (form,) = [kind for kind in kinds if kind["connection_type"] == "ckpt"]
    assert {"ha_dir", "ha_cluster_id", "verify", "ca_file", "timeout"} <= set(form["extra_fields"])
    url = f"http://127.0.0.1:{session.port}"
    HaStore(str(tmp_path)).leader.signed_by(LeaseSignature("token", "default")).claim(url, "app", "1", after=0)
    fields = {"connection_id": "tried", "conn_type": "ckpt"}
    by_address = {**fields, "host": "127.0.0.1", "port": session.port}
    by_leader = {**fields, "password": "token", "extra": json.dumps({"ha_dir": str(tmp_path)})}
    for connection in (by_address, by_leader):
        answer = airflow.api.call("POST", "/connections/test", connection)
        assert answer["status"], answer
        assert re.match(rf"version \S+, leader {url}, .* jobs running", answer["message"]), answer
    wrong = airflow.api.call("POST", "/connections/test", {**by_leader, "password": "another-token"})
    assert not wrong["status"]
    assert "does not prove its leader's address" in wrong["message"]


def begin_drill(airflow: LocalAirflow, job: SequenceJob, directory: Path) -> DagRun:
    """Of the job's latest savepoint in the directory."""
    arguments = ["--output", str(job.out), "--faults", str(job.faults), "--rate", "50", "--batch", "8"]
    given = {
        "latest_of": job.job_id,
        "directory": str(directory),
        "pipeline": str(program_of("sequence")),
        "entry": "sequence:pipeline",
        "args": [*arguments, "--rows", "0"],
        "parallelism": 1,
        "configuration": {"execution.checkpointing.dir": str(job.checkpoints)},
        "checkpoint_interval": "500 ms",
    }
    return airflow.trigger_dag("ckpt_restore_drill", given)


def assert_drilled(airflow: LocalAirflow, run: DagRun, job: SequenceJob, savepoint: str) -> None:
    """The drill has ended, is recorded in the catalogue, and has left nothing behind."""
    assert airflow.api.xcom(run, "drill", "savepoint_path") == savepoint
    drilled = airflow.api.xcom(run, "drill", "job_id")
    assert job.cluster.status(drilled) is JobStatus.CANCELED
    (found,) = list_savepoints(str(Path(savepoint.removeprefix("file:")).parent))
    assert found.entry is not None
    assert [(mark.passed, mark.by) for mark in found.entry.drills] == [(True, "airflow: ckpt_restore_drill/drill")]
    job.cluster.wait_until(lambda: not (job.checkpoints / drilled).exists(), "the drill's directory to go")


def timeout_ms(job: SequenceJob) -> int:
    """The checkpoint timeout that holds."""
    return job.cluster.of_job(job.job_id, lambda job: job.checkpoint_config()).settings.timeout_ms


def event_at(airflow: LocalAirflow, path: str) -> dict[str, Any] | None:
    """The payload of the asset's event for a savepoint, in a run that it has started."""
    runs = airflow.api.call("GET", "/dags/system_new_savepoint/dagRuns")["dag_runs"]
    for found in runs:
        run = DagRun("system_new_savepoint", found["dag_run_id"])
        if airflow.api.run_state(run) == "success":
            payloads = airflow.api.xcom(run, "payloads")
            wanted = [payload for payload in payloads if payload["path"] == path]
            if wanted:
                return dict(wanted[0])
    return None


@pytest.mark.row("air.5", "air.6", "air.9", "air.10")
def test_the_delivered_dags_work_on_a_job_that_is_named(
    airflow: LocalAirflow, session: Session, job: SequenceJob
) -> None:
    """All at once. The job's latest savepoint is drilled beside it meanwhile, and its output stays exact."""
    name, base = "system job", str(job.directory / "savepoints")
    job.start(**SLOWLY, configuration=every_second(pipeline__name=name))
    job.running()
    job.has_output()
    drilled = job.cluster.savepoint(job.job_id, job.directory / "drilled")
    until(lambda: airflow.api.has_dag("system_new_savepoint"), "the DAG that waits for savepoints")
    looks = session.requests["GET /jobs/overview"]
    airflow.api.unpause("system_new_savepoint")
    airflow.api.parse_again("system_new_savepoint")
    until(lambda: session.requests["GET /jobs/overview"] > looks + 1, "the watcher's looks")

    known = {"job": name}
    patch = airflow.trigger_dag("ckpt_patch", known | {"interval": "300 ms", "timeout": "5 min"})
    now = airflow.trigger_dag("ckpt_savepoint_now", known | {"directory": base, "copy_to": f"{job.directory}/copies"})
    jobs = [name, "no such job", " "]  # the last can be no job's name
    scheduled = airflow.trigger_dag(
        "ckpt_scheduled_savepoints", {"jobs": jobs, "directory": f"{base}/by-schedule", "keep": 1}
    )
    drill = begin_drill(airflow, job, job.directory / "drilled")
    for run in (patch, now, drill):
        assert airflow.wait_run(run, 390) == "success", airflow.failure_report(run)
    assert airflow.wait_run(scheduled, 390) == "failed"
    assert airflow.api.xcom(scheduled, "results", "jobs") == {
        name: {"savepoint": "success", "verify": "success", "clean_up": "success"},
        "no such job": {"savepoint": "skipped", "verify": "skipped", "clean_up": "skipped"},
        " ": {"savepoint": "failed", "verify": "upstream_failed", "clean_up": "upstream_failed"},
    }
    assert timeout_ms(job) == 300_000
    path = airflow.api.xcom(now, "savepoint", "savepoint_path")
    assert [copy.name for copy in (job.directory / "copies").iterdir()] == [path.rpartition("/")[2]]
    (directory,) = (job.directory / "savepoints" / "by-schedule").iterdir()
    assert len(list(directory.iterdir())) == 1
    event = until(lambda: event_at(airflow, path), "the event of the savepoint")
    assert (event["job"], event["job_id"], event["kind"]) == (name, job.job_id, "SAVEPOINT")
    assert event["size"] > 0
    assert_drilled(airflow, drill, job, drilled)
    job.stopped()


@pytest.mark.row("air.7", "air.15")
def test_pages_in_airflow_require_the_right_to_read_the_connection(
    airflow: LocalAirflow, session: Session, waiting: Waiting
) -> None:
    held, run = waiting.job, waiting.savepoint
    conn_id = guarded_connection(airflow, session)
    airflow.api.call("POST", "/connections", {"connection_id": "other", "conn_type": "http", "host": "127.0.0.1"})
    paths = [f"{conn_id}/{path}" for path in ("web/", "web/app.js", "overview", f"jobs/{held.job_id}/checkpoints")]
    of_run = f"of/{run.dag_id}/{quote(run.run_id, safe='')}"
    views = [f"{of_run}/savepoint/-1", of_run, f"of/{run.dag_id}", f"{of_run}/another/{{MAP_INDEX}}"]
    refused = [f"{conn_id}/{path}" for path in ("jars", "jobmanager/config", "metrics", "web/nosuch.js")]
    refused += ["other/overview", "nosuch/overview"]
    seen = visits(airflow, ["", *paths, *refused, *views, "trouble"], f"{conn_id}/jobs/{held.job_id}")
    assert {role: [status for status, _ in answers[1:5]] for role, answers in seen.items() if role != "changes"} == {
        "anonymous": [401] * 4,
        "VIEWER": [403] * 4,
        "USER": [403] * 4,
        "OP": [200] * 4,
        "ADMIN": [200] * 4,
    }
    assert [status for status, _ in seen["ADMIN"][5:11]] == [404] * 6
    assert [status for status, _ in seen["changes"]] == [405] * 3
    assert sorted(re.findall(r'href="(\w+)/web/"', seen["OP"][0][1])) == ["ckpt_default", conn_id]
    assert "There is no connection" in seen["VIEWER"][0][1]
    assert seen["anonymous"][0][0] == 401
    assert TOKEN not in json.dumps(seen)
    assert {role: [status for status, _ in answers[11:15]] for role, answers in seen.items() if role != "changes"} == {
        "anonymous": [401] * 4,
        "VIEWER": [200] * 4,
        "USER": [200] * 4,
        "OP": [303, 200, 200, 200],
        "ADMIN": [303, 200, 200, 200],
    }
    of_task, *lists, without = (text for _, text in seen["VIEWER"][11:15])
    assert "You may not read the connection ckpt_default" in of_task
    assert all("You may not read the connections" in text for text in lists)
    for text in (text for _, text in seen["OP"][12:14]):
        assert f"/ckpt/ckpt_default/web/#/jobs/{held.job_id}/checkpoints" in text
        assert ">sequence<" in text
        assert ">running<" in text
    assert "has no stream job" in without
    assert (seen["anonymous"][15][0], json.loads(seen["VIEWER"][15][1])["connections"]) == (401, 0)
    assert json.loads(seen["OP"][15][1])["connections"] >= 2


@pytest.mark.long
@pytest.mark.row("air.7", "air.15")
@pytest.mark.skipif(chromium() is None, reason="there is no Chromium")
def test_the_pages_in_airflows_own(airflow: LocalAirflow, session: Session, waiting: Waiting, tmp_path: Path) -> None:
    """By the menu, by the link of a task that waits, and by the views of the task and of its run."""
    held, run = waiting.job, waiting.savepoint
    conn_id = guarded_connection(airflow, session, "seen_in_a_browser")
    asked: list[str] = []
    screenshots = Path(os.environ.get("CKPT_SCREENSHOTS", tmp_path / "screenshots"))
    with open_browser() as browser, visit(browser, screenshots, without=("/savepoints",)) as opened:
        page = opened.page
        page.on("request", lambda request: asked.append(f"{request.url} {request.headers} {request.post_data}"))
        page.goto(airflow.base_url)
        expect(page.get_by_role("heading", name="Stream jobs that need attention")).to_be_visible()
        opened.shot("airflow-home")
        page.get_by_role("button", name="Browse").click()
        page.get_by_role("menuitem", name="Checkpoints").click()
        frame = page.frame_locator("iframe")
        frame.get_by_role("link", name=conn_id).click()
        expect(frame.locator("#page:not([aria-busy])")).to_be_visible()
        frame.get_by_role("link", name="sequence").first.click()
        expect(frame.locator("#page")).to_contain_text("Durations")
        expect(frame.locator(".pending").first).to_contain_text("subtasks have acknowledged")
        opened.shot("airflow-menu")
        page.goto(f"{airflow.base_url}/dags/{run.dag_id}/runs/{run.run_id}/tasks/savepoint/details")
        link = page.locator(f'a[href$="#/jobs/{held.job_id}/checkpoints"]')
        expect(link).to_be_visible()
        opened.shot("airflow-task")
        link.click()
        expect(page.locator("#page")).to_contain_text("History")
        expect(page.locator("#page")).to_contain_text(held.job_id)
        assert page.url.startswith(f"{airflow.base_url}/ckpt/ckpt_default/web/")
        page.goto(f"{airflow.base_url}/dags/{run.dag_id}/runs/{run.run_id}/tasks/savepoint")
        page.get_by_role("link", name="Stream job", exact=True).click()
        expect(frame.locator("#page")).to_contain_text("Durations")
        expect(frame.locator("#page")).to_contain_text(held.job_id)
        opened.shot("airflow-view-of-a-task")
        page.goto(f"{airflow.base_url}/dags/{run.dag_id}/runs/{run.run_id}")
        page.get_by_role("link", name="Stream jobs", exact=True).click()
        expect(frame.get_by_role("link", name="sequence")).to_be_visible()
        opened.shot("airflow-view-of-a-run")
        assert not [request for request in asked if TOKEN in request]
        opened.complaints[:] = [said for said in opened.complaints if "/ckpt/" in said and "sandbox" not in said]


@pytest.mark.row("air.2", "air.3")
def test_deferred_task_shows_its_job_and_ends_when_the_condition_holds(airflow: LocalAirflow, waiting: Waiting) -> None:
    job = waiting.job
    links = airflow.api.call("GET", f"{waiting.savepoint.path}/taskInstances/savepoint/links")["extra_links"]
    assert links["Job"] == f"/ckpt/ckpt_default/web/#/jobs/{job.job_id}/health"
    job.release("processor")
    for run in (waiting.savepoint, waiting.sensor):
        assert airflow.wait_run(run, 390) == "success", airflow.failure_report(run)
    assert savepoints(job) == [airflow.api.xcom(waiting.savepoint, "savepoint", "savepoint_path")]
    assert airflow.api.xcom(waiting.sensor, "checkpoint", "checkpoint_id") >= waiting.latest_checkpoint + 2
    job.stopped()


@pytest.mark.long
@pytest.mark.row("air.7", "air.15")
@pytest.mark.skipif(chromium() is None, reason="there is no Chromium")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_pages_of_the_plugin_have_no_finding_of_axe(
    airflow: LocalAirflow, session: Session, held: SequenceJob, tmp_path: Path, dark: bool
) -> None:
    """The list of connections, the jobs of a DAG and of a run, pages without anything to show, the card."""
    guarded_connection(airflow, session, f"axe_{dark}".lower())
    run = trigger(airflow, "system_savepoint", held)
    wait_state(airflow, run, "savepoint", "deferred")
    of_run = f"of/{run.dag_id}/{quote(run.run_id, safe='')}"
    paths = ["", f"of/{run.dag_id}", of_run, f"{of_run}/another/-1", "of/system_sensor", "ckpt_default/web/"]
    screenshots = Path(os.environ.get("CKPT_SCREENSHOTS", tmp_path / "screenshots"))
    found: list[str] = []
    with open_browser() as browser, visit(browser, screenshots, dark=dark, without=(airflow.base_url,)) as opened:
        page = opened.page
        for number, path in enumerate(paths):
            page.goto(f"{airflow.base_url}/ckpt/{path}")
            expect(page.locator("h1")).to_be_visible()
            opened.shot(f"plugin-{'dark' if dark else 'light'}-{number}")
            found += findings(page, f"/ckpt/{path}")
        page.goto(airflow.base_url)
        expect(page.get_by_role("heading", name="Stream jobs that need attention")).to_be_visible()
        opened.shot(f"plugin-{'dark' if dark else 'light'}-card")
        found += findings(page, "the card", 'section[aria-label="Stream jobs that need attention"]')
        page.goto(f"{airflow.base_url}/ckpt/of/{run.dag_id}")
        expect(page.locator("table")).to_contain_text("sequence")
        page.evaluate("() => { window.isTheSamePage = true; }")
        held.release("processor")
        expect(page.get_by_text("healthy", exact=True)).to_be_visible(timeout=PATIENCE_MS * 4)
        assert page.evaluate("() => window.isTheSamePage")
    assert not found, "\n".join(found)
    assert airflow.wait_run(run, 240) == "success", airflow.failure_report(run)
