"""The tutorial as a reader follows it: its commands, files and forms in a browser, with ``airflow standalone``.

Other than in the text are the folder, the ports, and that everything is installed already.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from demo.airflow_api import AirflowApi, DagRun
from tests.docs.markdown import DOCS, Block, blocks
from tests.support.browser import chromium, open_browser, visit
from tests.support.patience import patient
from tests.support.spark_sessions import free_port
from tests.system.airflow_instance import ROOT, until
from tests.system.test_forms_in_airflow import PATIENCE_MS, open_section, submit

pytestmark = [
    pytest.mark.airflow,
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium"),
]
FOLDER = "/tmp/tutorial"


class Reader:
    """Does what the tutorial says, in a folder and at ports of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.session_port, self.airflow_port = free_port(), free_port()
        self.base_url = f"http://localhost:{self.airflow_port}"
        page = DOCS / "airflow-tutorial.md"
        self.blocks = [block for block in blocks("sh", "python") if block.page == page]
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("AIRFLOW", "CKPT"))}
        self.environment = kept | {
            "HOME": str(folder / "home"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}",
            "AIRFLOW__API__PORT": str(self.airflow_port),
            "AIRFLOW__API__BASE_URL": self.base_url,
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.base_url}/execution/",
            # A loaded machine needs more than Airflow's 5 s.
            "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "120",
            "AIRFLOW__CORE__PARALLELISM": "4",
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "5",
        }
        (folder / "home").mkdir()
        self.airflow: list[subprocess.Popen[bytes]] = []

    def block(self, word: str) -> str:
        """The one block of the page with this word, in this test's folder."""
        (found,) = (block for block in self.blocks if word in block.text)
        return self._here(found)

    def _here(self, block: Block) -> str:
        return block.text.replace(FOLDER, str(self.folder))

    def shell(self, text: str) -> str:
        """What the commands print."""
        done = subprocess.run(
            ["bash", "-euc", text],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=patient(300),
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """At the end, the session and Airflow are gone, whatever has failed."""
    found = Reader(tmp_path)
    yield found
    for process in found.airflow:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=patient(60))
        finally:
            for member in group_members(process.pid):
                os.kill(member, signal.SIGKILL)
    if (tmp_path / "home/.local/state/ckpt/session.json").exists():
        subprocess.run(["ckpt", "session", "stop"], env=found.environment, check=False, timeout=patient(120))


def group_members(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == group:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def log_in(page: Page, reader: Reader, password: str) -> None:
    page.goto(reader.base_url)
    page.locator("input[name=username]").fill("admin")
    page.locator("input[name=password]").fill(password)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("link", name="Dags").first).to_be_visible()


def add_connection(page: Page, reader: Reader, token: str) -> None:
    """As section 3 says; a wrong port is corrected after the first test."""
    page.goto(f"{reader.base_url}/connections")
    page.get_by_role("button", name="Add Connection").click()
    form = page.get_by_role("dialog")
    form.locator("input[name=connection_id]").fill("ckpt_default")
    form.get_by_role("combobox").fill("Checkpoint runtime")
    page.get_by_role("option", name="Checkpoint runtime").click()
    standard = open_section(form, "Standard Fields")
    standard.locator("input[name=host]").fill("127.0.0.1")
    standard.locator("input[name=port]").fill(str(reader.session_port))
    standard.locator("input[name=password]").fill(token)
    form.get_by_role("button", name="Save").click()
    row = page.get_by_role("row", name="ckpt_default")
    with page.expect_response(lambda response: response.url.endswith("/connections/test")) as answered:
        row.get_by_role("button", name="Test Connection").click()
    answer = answered.value.json()
    assert answer["status"], answer
    assert re.match(r"version \S+, leader \S+, 1 of 2 slots available, 1 jobs running", answer["message"]), answer


class Pages:
    """Airflow's pages and API, as the user ``admin``."""

    def __init__(self, page: Page, reader: Reader, api: AirflowApi) -> None:
        self.page, self.reader, self.api = page, reader, api

    def trigger(self, dag_id: str, fill: dict[str, dict[str, str]]) -> DagRun:
        """Fill in the form of a DAG: section, field, value. Returns the run."""
        until(lambda: self.api.has_dag(dag_id), f"the DAG {dag_id}")
        self.api.unpause(dag_id)
        before = self.runs(dag_id)
        self.page.goto(f"{self.reader.base_url}/dags/{dag_id}")
        self.page.get_by_role("button", name="Trigger").first.click()
        form = self.page.get_by_role("dialog")
        for section, fields in fill.items():
            self._fill(open_section(form, section), fields)
        submit(form)
        (run,) = until(lambda: self.runs(dag_id) - before, f"a run of {dag_id}")
        self.page.goto("about:blank")
        return DagRun(dag_id, run)

    @staticmethod
    def _fill(section: Locator, fields: dict[str, str]) -> None:
        for name, value in fields.items():
            if value == "on":  # the box itself is hidden
                section.locator(f'label:has(input[name="element_{name}"])').click()
            else:
                field = section.locator(f"#element_{name}")
                field.fill(value)
                field.blur()

    def runs(self, dag_id: str) -> set[str]:
        return {run["dag_run_id"] for run in self.api.call("GET", f"/dags/{dag_id}/dagRuns")["dag_runs"]}

    def succeeds(self, run: DagRun) -> None:
        def ended() -> str | None:
            state = self.api.run_state(run)
            return state if state in ("success", "failed") else None

        assert until(ended, f"the end of {run.dag_id}", 600) == "success", self.api.task_states(run)


def connect(reader: Reader, password: str) -> AirflowApi:
    answer = httpx.post(f"{reader.base_url}/auth/token", json={"username": "admin", "password": password}, timeout=60)
    answer.raise_for_status()
    headers = {"Authorization": f"Bearer {answer.json()['access_token']}"}
    return AirflowApi(httpx.Client(base_url=f"{reader.base_url}/api/v2", headers=headers, timeout=60))


@pytest.mark.row("air.6")
def test_every_step_of_the_tutorial_works(reader: Reader, tmp_path: Path) -> None:
    # 2. A job to look after
    pipeline = tmp_path / "digits.py"
    pipeline.write_text(reader.block("# digits.py"))
    commands = reader.block("ckpt session start").replace("start --", f"start --rest-port {reader.session_port} --")
    assert "digits" in reader.shell(commands)
    session = json.loads((tmp_path / "home/.local/state/ckpt/session.json").read_text())
    # 3. Airflow, and how it reaches the session
    exports, _, command = reader.block("airflow standalone").rstrip().rpartition("\n")
    reader.shell(exports)
    given = dict(re.findall(r"^export (\w+)=(.*)$", exports, re.MULTILINE))
    with (tmp_path / "airflow.log").open("wb") as log:
        started = subprocess.Popen(
            command.split(), env=reader.environment | given, stdout=log, stderr=log, start_new_session=True
        )
    reader.airflow.append(started)
    home = Path(given["AIRFLOW_HOME"])
    # 4. Install the DAGs, and those of the sections that follow
    for number, word in enumerate(("import ckpt_patch", "hourly_savepoints", "weekly_drill", "redeploy_digits")):
        (home / "dags" / f"tutorial_{number}.py").write_text(reader.block(word))

    def healthy() -> bool:
        assert started.poll() is None, (tmp_path / "airflow.log").read_text()[-3000:]
        try:
            answer = httpx.get(f"{reader.base_url}/api/v2/monitor/health", timeout=30)
        except httpx.HTTPError:
            return False
        found = answer.json() if answer.status_code == 200 else {}
        return all((found.get(name) or {}).get("status") == "healthy" for name in ("scheduler", "triggerer"))

    until(healthy, "a healthy Airflow", 600)
    password = json.loads((home / "simple_auth_manager_passwords.json.generated").read_text())["admin"]
    assert password in (tmp_path / "airflow.log").read_text()
    screenshots = Path(os.environ.get("CKPT_SCREENSHOTS", tmp_path / "screenshots"))
    with open_browser() as browser, visit(browser, screenshots, without=(reader.base_url,)) as opened:
        opened.page.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        log_in(opened.page, reader, password)
        add_connection(opened.page, reader, session["token"])
        opened.shot("tutorial-connection")
        follow(Pages(opened.page, reader, connect(reader, password)), reader, pipeline)
    # 9. Clean up
    assert reader.block("ckpt session stop").splitlines()[0] == "ckpt session stop"
    reader.shell("ckpt session stop")


def follow(pages: Pages, reader: Reader, pipeline: Path) -> None:
    """Sections 5 to 8."""
    job, savepoints = {"Job": {"job": "digits"}}, str(reader.folder / "savepoints")
    run = pages.trigger("ckpt_savepoint_now", job)
    pages.succeeds(run)
    assert pages.api.xcom(run, "savepoint", "savepoint_path").startswith(f"file://{savepoints}/")
    assert pages.api.task_states(run)["verify"] == "success"
    run = pages.trigger("ckpt_scheduled_savepoints", {"Retention": {"preview": "on"}})
    pages.succeeds(run)
    assert set(pages.api.xcom(run, "results", "jobs")) == {"digits"}
    what = {"latest_of": "digits", "directory": savepoints}
    program = {"pipeline": str(pipeline), "args": str(reader.folder / "digits")}
    run = pages.trigger("ckpt_restore_drill", {"Savepoint to restore": what, "Job": program})
    pages.succeeds(run)
    listed = reader.shell(reader_command(f"ckpt snapshot list {savepoints}"))
    assert "drilled" in listed, listed
    run = pages.trigger("ckpt_patch", job | {"Times": {"interval": "7 s"}})
    pages.succeeds(run)
    run = pages.trigger("redeploy_digits", {})
    pages.succeeds(run)
    assert pages.api.xcom(run, "start", "started_from") == pages.api.xcom(run, "stop", "savepoint_path")
    for dag_id in ("hourly_savepoints_of_digits", "weekly_drill_of_digits"):
        run = pages.trigger(dag_id, {})
        pages.succeeds(run)


def reader_command(text: str) -> str:
    """A command that the text of the tutorial names, which must be there."""
    page = (DOCS / "airflow-tutorial.md").read_text()
    assert " ".join(text.split()[:3]) in page
    return text
