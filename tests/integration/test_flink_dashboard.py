"""Flink's own dashboard over a session, in a real browser: every tab, without a word in its console.

Needs a Flink distribution, which ``FLINK_HOME`` names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from ckpt_runtime.rest import server as rest_server
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.testing.mini_cluster import MiniCluster
from ckpt_runtime.web.flink_dashboard import FlinkDashboard
from tests.support.browser import chromium, open_browser, visit
from tests.support.jobs import SequenceJob

TOKEN = "a-token-for-the-dashboard"
HOME = os.environ.get("FLINK_HOME", "")

pytestmark = [
    pytest.mark.flink,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not HOME, reason="FLINK_HOME is not set: it names a Flink distribution"),
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium"),
]


@pytest.fixture
def address(cluster: MiniCluster) -> Iterator[str]:
    app = create_app(cluster.dispatcher, token=TOKEN, flink_dashboard=FlinkDashboard.of(HOME))
    server, port = cluster.call(rest_server.start(app, "127.0.0.1", 0))
    yield f"http://127.0.0.1:{port}"
    cluster.call(rest_server.stop(server))


@pytest.mark.row("air.7")
def test_every_tab_without_a_complaint(cluster: MiniCluster, job: SequenceJob, address: str, tmp_path: Path) -> None:
    job.start(rate=500)
    job.running()
    cluster.wait_for_checkpoints(job.job_id, 2)
    job.inject("processor-raise")
    job.restarted(1)
    cluster.wait_for_checkpoints(job.job_id, 1)
    screenshots = Path(os.environ.get("CKPT_SCREENSHOTS", tmp_path / "screenshots"))
    vertices = [vertex.vertex_id for vertex in cluster.call(cluster.dispatcher.job_details(job.job_id)).vertices]
    agent = cluster.call(cluster.dispatcher.slot_agents())[0].slot_id
    process = ("logs", "stdout", "thread-dump", "profiler")
    running = f"job/running/{job.job_id}"
    pages = {
        "overview": "sequence",
        "job/running": "sequence",
        "job/completed": "Completed Jobs",
        "task-manager": "Free Slots",
        "job-manager/config": "allow-list",
        **{f"job-manager/{tab}": "" for tab in ("metrics", "log", *process)},
        **{f"task-manager/{agent}/{tab}": "" for tab in ("metrics", "log-list", *process)},
        f"{running}/overview": "order-sink",
        **{f"{running}/overview/{vertices[1]}/{tab}": "" for tab in
           ("detail", "subtasks", "taskmanagers", "watermarks", "accumulators", "backpressure", "metrics")},
        f"{running}/timeline": "",
        f"{running}/exceptions": "InjectedError",
        f"{running}/configuration": "execution",
        f"{running}/checkpoints": "Completed",
    }  # fmt: skip
    with open_browser() as browser, visit(browser, screenshots) as opened:
        page = opened.page
        answers: list[str] = []
        page.goto(f"{address}/flink/")
        page.get_by_label("The session's token").fill(TOKEN)
        page.get_by_role("button", name="Log in").click()
        opened.complaints.clear()  # the 401 that led to the login
        page.on("response", lambda answer: answers.append(f"{answer.status} {answer.url}"))
        page.get_by_role("link", name="Flink's dashboard").click()
        for route, word in pages.items():
            page.goto(f"{address}/flink/#/{route}")
            expect(page.locator("flink-root")).to_contain_text(word or "Apache Flink")
            page.wait_for_load_state("networkidle")
            opened.shot(f"flink-{route.replace(job.job_id, 'job').replace('/', '-')[:60]}")
        for tab in ("History", "Summary", "Configuration", "Overview"):
            page.get_by_role("tab", name=tab, exact=True).last.click()
            page.wait_for_load_state("networkidle")
            opened.shot(f"flink-checkpoints-{tab}")
        assert [line for line in answers if line >= "4"] == []
