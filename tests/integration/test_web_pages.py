"""The web pages in a real browser, against a job that runs: what they show, on desk and phone, by day and by night.

Every visit fails for a word of complaint in the browser's console. Screenshots are taken if ``CKPT_SCREENSHOTS`` names
a directory for them.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route, expect

from ckpt_runtime.jobmaster.gateway_values import CheckpointKind
from ckpt_runtime.rest import server as rest_server
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.axe import findings
from tests.support.browser import DESK, PHONE, Visit, chromium, open_browser, visit
from tests.support.jobs import SequenceJob, fast

pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium: neither on the path nor named by CHROMIUM"),
    pytest.mark.timeout(240),
]

HOSTILE = '<script>alert("name")</script><img src=x onerror=alert(1)>'
TOKEN = "a-token-for-the-pages"
CATALOGUE = ("/savepoints",)
"""Without a directory of savepoints there is none, which browsers write into their console."""


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    named = os.environ.get("CKPT_SCREENSHOTS")
    return Path(named) if named else tmp_path_factory.mktemp("screenshots")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as started:
        yield started


@pytest.fixture(scope="module")
def shown(cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SequenceJob]:
    """A job with a hostile name, two checkpoints and a savepoint; more of them come when a test asks for one."""
    job = SequenceJob(cluster, tmp_path_factory.mktemp("shown"))
    seldom = fast(execution__checkpointing__interval="1 h")
    job.start(rate=500, configuration=seldom | {"pipeline.name": HOSTILE, "my.password": "hunter2"})
    job.running()
    for _ in range(2):
        known = cluster.completed_checkpoints(job.job_id)
        ask_for_checkpoint(job)
        cluster.wait_until(lambda known=known: cluster.completed_checkpoints(job.job_id) > known, "a checkpoint")
    cluster.savepoint(job.job_id, job.directory / "savepoints")
    yield job
    job.release("processor")
    job.end()


def ask_for_checkpoint(job: SequenceJob) -> None:
    dispatcher = job.cluster.dispatcher
    job.cluster.call(dispatcher.trigger_checkpoint(job.job_id, CheckpointKind.CONFIGURED, None))


@pytest.fixture
def page(browser: Browser, screenshots: Path, cluster: MiniCluster) -> Iterator[Visit]:
    with visit(browser, screenshots, without=CATALOGUE) as opened:
        yield opened


def go(opened: Visit, cluster: MiniCluster, route: str = "/") -> None:
    opened.page.goto(f"{cluster.rest_url}/web/#{route}")
    expect(opened.page.locator(f'#page[data-path="{route}"]:not([aria-busy])')).to_be_visible()


def fits(opened: Visit) -> bool:
    """Nothing sticks out sideways."""
    return bool(opened.page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth"))


@pytest.mark.row("air.7")
@pytest.mark.parametrize(
    ("size", "dark"),
    [pytest.param(DESK, False, id="desk"), pytest.param(PHONE, True, id="phone, dark", marks=pytest.mark.long)],
)
def test_every_page_of_a_running_job(
    browser: Browser, screenshots: Path, cluster: MiniCluster, shown: SequenceJob, size: tuple[int, int], dark: bool
) -> None:
    kind = f"{'phone' if size == PHONE else 'desk'}-{'dark' if dark else 'light'}"
    job, dispatcher = f"/jobs/{shown.job_id}", cluster.dispatcher
    vertex = cluster.call(dispatcher.job_details(shown.job_id)).vertices[0].vertex_id
    agent = cluster.call(dispatcher.slot_agents())[0].id
    expected = {
        "/": ["running", "healthy", shown.job_id[:8] if size == DESK else HOSTILE],
        job: ["Durations", "Sizes", "History", "completed", "every 1 h"],
        f"{job}/savepoints": ["native", "file:///"],
        f"{job}/configuration": ["execution.checkpointing.interval", "given at submission", "******"],
        f"{job}/health": ["No failures", "order -> order", "Restarts", "Processes", "Driver"],
        f"{job}/vertices/{vertex}/flamegraph": ["Flame graph of", "sampled for two seconds"],
        f"/processes/{agent}/threads": [f"Threads of task manager {agent}", "MainThread"],
        f"/processes/{agent}/log": [f"Log of task manager {agent}"],
        "/processes/driver/threads": ["Threads of the driver", "MainThread"],
        f"{job}/checkpoints/1": ["Checkpoint 1", "completed", "2 of 2 subtasks", "order -> order"],
        "/savepoints": [HOSTILE, "file:///"],
    }
    with visit(browser, screenshots, size=size, dark=dark, without=CATALOGUE) as opened:
        for route, words in expected.items():
            go(opened, cluster, route)
            for word in words:
                expect(opened.page.locator("#page")).to_contain_text(word)
            assert "hunter2" not in opened.page.content()
            assert fits(opened), route
            opened.shot(f"{kind}-{route.removeprefix(job).strip('/').replace('/', '-') or route.count('/')}")
        ground = opened.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(20, 23, 27)" if dark else "rgb(251, 251, 250)")


@pytest.mark.row("air.7")
@pytest.mark.parametrize(
    ("dark", "pages"),
    [
        pytest.param(False, 2, id="light, two pages"),
        *(pytest.param(dark, 8, id="dark" if dark else "light", marks=pytest.mark.long) for dark in (False, True)),
    ],
)
def test_pages_have_no_finding_of_axe(
    browser: Browser, screenshots: Path, cluster: MiniCluster, shown: SequenceJob, dark: bool, pages: int
) -> None:
    job = f"/jobs/{shown.job_id}"
    routes = [job, f"{job}/health", "/", f"{job}/savepoints", f"{job}/configuration", f"{job}/checkpoints/1"]
    found_here: list[str] = []
    with visit(browser, screenshots, dark=dark, without=CATALOGUE) as opened:
        for route in [*routes, "/savepoints", "/processes/driver/threads"][:pages]:
            go(opened, cluster, route)
            found_here += findings(opened.page, route)
    assert not found_here, "\n".join(found_here)


def test_links_of_a_job_lead_to_its_processes_and_to_the_log_of_a_killed_worker(
    page: Visit, cluster: MiniCluster, job: SequenceJob
) -> None:
    job.start(rate=500)
    job.running()
    os.kill(cluster.worker_pids(job.job_id)[0], signal.SIGKILL)
    job.restarted(1)
    route = f"/jobs/{job.job_id}/health"
    for name, words in {
        "Flame graph": "Flame graph of",
        "Threads": "Threads of the driver",
        "Log": "Log of the driver",
        re.compile(r"^worker-.*\.log$"): "SIGKILL",
    }.items():
        go(page, cluster, route)
        page.page.get_by_role("link", name=name, exact=True).first.click()
        expect(page.page.locator("#page")).to_contain_text(words)


@pytest.mark.parametrize("theme", [pytest.param("light", marks=pytest.mark.long), "dark"])
def test_pages_in_a_frame_follow_the_theme_of_the_surrounding_page(
    browser: Browser, screenshots: Path, cluster: MiniCluster, theme: str
) -> None:
    """As Airflow shows them: its document has the theme as a class, and may change it while the page is shown."""
    other = {"light": "dark", "dark": "light"}
    ground = {"dark": "rgb(20, 23, 27)", "light": "rgb(251, 251, 250)"}
    frame_of = {"x-frame-options": "", "content-security-policy": ""}

    def framed(route: Route) -> None:
        answer = route.fetch()
        kept = {name: value for name, value in answer.headers.items() if name not in frame_of}
        route.fulfill(response=answer, headers=kept)

    def outer(route: Route) -> None:
        body = f'<!DOCTYPE html><html class="{theme}"><body><iframe src="/web/#/"></iframe></body></html>'
        route.fulfill(body=body, content_type="text/html")

    with visit(browser, screenshots, dark=theme == "light", without=CATALOGUE) as opened:
        opened.page.route("**/outer", outer)
        opened.page.route("**/web/", framed)
        opened.page.goto(f"{cluster.rest_url}/outer")
        body = opened.page.frame_locator("iframe").locator("body")
        expect(body).to_have_css("background-color", ground[theme])
        opened.page.evaluate("name => { document.documentElement.className = name; }", other[theme])
        expect(body).to_have_css("background-color", ground[other[theme]])


def test_every_living_job_has_its_verdict_and_the_worst_comes_first(page: Visit, cluster: MiniCluster) -> None:
    """Of more jobs than are asked for at a time, with answers as the session gives them."""
    ids = [f"{number:032x}" for number in range(1, 51)]
    line = {"state": "RUNNING", "start-time": 1, "end-time": -1, "duration": 1, "last-modification": 1, "tasks": {}}
    failed = line | {"state": "FAILED", "end-time": 2}
    jobs = [{"jid": "e" * 32, "name": "job 01"} | failed | {"start-time": 0}]
    jobs += [{"jid": job, "name": f"job {job[-2:]}"} | line for job in ids]
    jobs.append({"jid": "f" * 32, "name": "a failed job"} | failed)
    page.page.route("**/jobs/overview", lambda route: route.fulfill(json={"jobs": jobs}))

    def health(route: Route) -> None:
        verdict = "UNHEALTHY" if ids[-1] in route.request.url else "HEALTHY"
        route.fulfill(json={"verdict": verdict, "reasons": [], "state": "RUNNING", "checkpoints": {}})

    page.page.route("**/health", health)
    go(page, cluster)
    rows = page.page.locator("tbody tr")
    expect(rows).to_have_count(52)
    expect(rows.nth(1)).to_contain_text("a failed job")
    expect(rows.last).to_contain_text("job 01")  # a later job has its name
    expect(rows.first).to_contain_text("job 32")
    expect(rows.first).to_contain_text("unhealthy")
    expect(page.page.get_by_text("healthy", exact=True)).to_have_count(49)


@pytest.mark.long
def test_the_page_distinguishes_a_checkpoint_that_left_the_history_from_one_that_never_existed(
    page: Visit, cluster: MiniCluster, shown: SequenceJob
) -> None:
    job = f"/jobs/{shown.job_id}"
    page.page.route("**/checkpoints/details/1", lambda route: route.fulfill(status=404, json={"errors": ["gone"]}))
    page.without = (*page.without, "/checkpoints/details/")
    go(page, cluster, f"{job}/checkpoints/1")
    expect(page.page.locator("#page")).to_contain_text("this one is older")
    expect(page.page.locator("#page")).to_contain_text("web.checkpoints.history")
    go(page, cluster, f"{job}/checkpoints/4711")
    expect(page.page.locator("#page")).to_contain_text("has not begun a checkpoint with this number")
    expect(page.page.locator("#page")).to_contain_text("All checkpoints in the history")


def test_a_hostile_name_is_text(page: Visit, cluster: MiniCluster, shown: SequenceJob) -> None:
    for route in ("/", f"/jobs/{shown.job_id}", f"/jobs/{shown.job_id}/checkpoints/1"):
        go(page, cluster, route)
        expect(page.page.get_by_text(HOSTILE).first).to_be_visible()
        assert page.page.locator("img, #page script").count() == 0
    assert HOSTILE in page.page.title()


def test_markup_from_a_script_is_refused_by_the_content_policy(page: Visit, cluster: MiniCluster) -> None:
    go(page, cluster)
    refused = page.page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>'; return ''; } catch (e) { return e.name; } }"
    )
    assert refused == "TypeError"
    page.complaints.clear()


@pytest.mark.row("air.7")
def test_a_pending_checkpoint_is_followed_live(page: Visit, cluster: MiniCluster, shown: SequenceJob) -> None:
    shown.hold("processor")
    try:
        ask_for_checkpoint(shown)
        go(page, cluster, f"/jobs/{shown.job_id}")
        pending = page.page.locator(".pending")
        expect(pending).to_contain_text("subtasks have acknowledged")
        expect(pending).to_contain_text("it expires in")
        # Others may be the reasons of the job's verdict.
        waits = page.page.locator("#page .reason").filter(has_text=re.compile(r"It waits for subtasks? [01]"))
        expect(waits.first).to_be_visible()
        number = pending.locator("a").inner_text().split()[1]
        page.shot("pending")
        pending.locator("a").click()
        expect(page.page.locator("#page")).to_contain_text("not yet")
        page.shot("pending-timeline")
    finally:
        shown.release("processor")
    expect(page.page.locator("#page .tile").first).to_contain_text("completed")
    expect(page.page.get_by_role("heading", name=f"Checkpoint {number}")).to_be_visible()
    expect(page.page.locator(".pending")).to_have_count(0)
    expect(page.page.locator("rect.part").first).to_be_visible()


@pytest.mark.long
def test_the_plan_is_coloured_by_back_pressure_and_says_where_that_begins(
    page: Visit, cluster: MiniCluster, shown: SequenceJob
) -> None:
    """Of a job whose source cannot send, because one of its two readers is busy."""
    vertices = {
        vertex.name: vertex.vertex_id for vertex in cluster.call(cluster.dispatcher.job_details(shown.job_id)).vertices
    }
    (source,) = (vertex for name, vertex in vertices.items() if "numbers" in name)
    (busy,) = (vertex for name, vertex in vertices.items() if "order" in name)

    def pressure(route: Route) -> None:
        ratio, busy_ratio = (
            (0.9, 0.1) if source in route.request.url else (0.0, 0.98 if busy in route.request.url else 0.2)
        )
        subtask = {"subtask": 0, "ratio": ratio, "busyRatio": busy_ratio, "idleRatio": 0}
        route.fulfill(json={"status": "ok", "subtasks": [subtask]})

    page.page.route("**/backpressure", pressure)
    go(page, cluster, f"/jobs/{shown.job_id}/health")
    plan = page.page.get_by_role("region", name="Plan of the job")
    expect(plan.locator(".node")).to_have_count(3)
    expect(plan.locator(".node.bad")).to_contain_text("blocked 90 %")
    expect(plan.locator(".node.cause")).to_have_count(1)
    expect(plan.locator(".node.cause")).to_contain_text("busy 98 %")
    expect(page.page.locator("#page")).to_contain_text("The back-pressure begins at order -> order: it is busy 98 %")
    page.shot("plan")


@pytest.mark.long
def test_bars_lead_to_the_checkpoint_by_keyboard_too(page: Visit, cluster: MiniCluster, shown: SequenceJob) -> None:
    go(page, cluster, f"/jobs/{shown.job_id}")
    bar = page.page.locator("svg.chart a").first
    assert "Checkpoint" in (bar.get_attribute("aria-label") or "")
    bar.press("Enter")
    expect(page.page.locator("section.vertex").first).to_be_visible()


@pytest.mark.long
def test_opened_details_stay_open_while_figures_change(page: Visit, cluster: MiniCluster, shown: SequenceJob) -> None:
    go(page, cluster, f"/jobs/{shown.job_id}/configuration")
    page.page.get_by_text("options have their default").click()
    later(page)
    expect(page.page.get_by_text("execution.checkpointing.num-retained")).to_be_visible()


def test_a_click_into_which_a_refresh_falls_is_not_lost(page: Visit, cluster: MiniCluster, shown: SequenceJob) -> None:
    go(page, cluster, f"/jobs/{shown.job_id}")
    page.page.get_by_role("link", name="Health").hover()
    page.page.mouse.down()
    as_of = page.page.locator("#foot")
    expect(as_of).not_to_have_text(as_of.inner_text())
    page.page.mouse.up()
    expect(page.page.locator(f'#page[data-path="/jobs/{shown.job_id}/health"]')).to_be_visible()


def later(opened: Visit) -> None:
    """Waits for one more round of answers."""
    with opened.page.expect_response(lambda answer: "/jobs/" in answer.url):
        pass


@pytest.mark.long
def test_a_hidden_tab_asks_nothing(page: Visit, cluster: MiniCluster, shown: SequenceJob) -> None:
    go(page, cluster)
    hidden = """(value) => {
        Object.defineProperty(document, 'hidden', {get: () => value, configurable: true});
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    page.page.clock.install()
    go(page, cluster, "/savepoints")
    page.page.evaluate(hidden, True)
    asked: list[str] = []
    page.page.on("request", lambda request: asked.append(request.url))
    page.page.clock.run_for(120_000)
    assert asked == []
    with page.page.expect_request(lambda request: request.url.endswith("/savepoints/known")):
        page.page.evaluate(hidden, False)


def test_page_shows_that_the_session_does_not_answer_and_recovers_later(
    page: Visit, cluster: MiniCluster, shown: SequenceJob
) -> None:
    def away(route: Route) -> None:
        route.abort("connectionrefused")

    go(page, cluster)
    page.page.route("**/overview", away)
    notice = page.page.locator("#notice")
    expect(notice).to_contain_text("The session does not answer. The page shows the data of")
    expect(page.page.get_by_text(HOSTILE).first).to_be_visible()
    page.shot("away")
    page.page.unroute("**/overview")
    expect(notice).to_be_hidden()
    page.complaints.clear()


@pytest.mark.long
def test_the_page_shows_that_the_session_answers_slowly(page: Visit, cluster: MiniCluster, shown: SequenceJob) -> None:
    """In the place of a first page, which would be blank for as long as that takes."""
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.page.route("**/overview", hold)
    with page.page.expect_request("**/overview"):
        page.page.goto(f"{cluster.rest_url}/web/")
    main = page.page.locator("main")
    words = main.evaluate("element => getComputedStyle(element, '::before').content")
    assert words == '"Waiting for the session to answer."'
    for route in held:
        route.continue_()
    page.page.unroute("**/overview")
    expect(page.page.get_by_text(HOSTILE).first).to_be_visible()
    assert main.evaluate("element => getComputedStyle(element, '::before').content") == "none"


def test_the_page_of_an_unknown_job_says_so(page: Visit, cluster: MiniCluster) -> None:
    page.page.goto(f"{cluster.rest_url}/web/#/jobs/{'0' * 32}")
    expect(page.page.locator("#page")).to_contain_text(f"Job {'0' * 32} not found")
    page.page.goto(f"{cluster.rest_url}/web/#/<script>")
    expect(page.page.locator("#page")).to_contain_text("There is no such page")
    page.complaints.clear()


def test_the_failure_of_a_job_is_shown_on_its_page(page: Visit, cluster: MiniCluster, job: SequenceJob) -> None:
    job.start(rate=500)
    job.running()
    job.has_output()
    job.inject("processor-raise")
    job.restarted(1)
    go(page, cluster, f"/jobs/{job.job_id}/health")
    page.page.locator("summary", has_text="in ").first.click()
    expect(page.page.locator("pre").first).to_contain_text("Traceback")
    expect(page.page.locator("p.reason").first).to_contain_text("restarted")
    page.shot("failure")


@pytest.fixture(scope="module")
def guarded(cluster: MiniCluster) -> Iterator[str]:
    """The same session behind a token."""
    server, port = cluster.call(rest_server.start(create_app(cluster.dispatcher, token=TOKEN), "127.0.0.1", 0))
    yield f"http://127.0.0.1:{port}"
    cluster.call(rest_server.stop(server))


@pytest.mark.row("air.7")
def test_login_and_logout(page: Visit, guarded: str, shown: SequenceJob) -> None:
    address = f"{guarded}/web/#/jobs/{shown.job_id}/health"
    page.page.goto(address)
    field = page.page.get_by_label("The session's token")
    field.fill("wrong")
    field.press("Enter")
    expect(page.page.get_by_role("alert").last).to_have_text("This is not the session's token.")
    page.shot("login")
    field.fill(TOKEN)
    page.page.get_by_role("button", name="Log in").click()
    expect(page.page.get_by_text(HOSTILE).first).to_be_visible()
    assert page.page.url == address
    (cookie,) = page.page.context.cookies()
    assert cookie.get("httpOnly")
    assert cookie.get("sameSite") == "Strict"
    assert TOKEN not in json.dumps(cookie)
    assert page.page.evaluate("() => document.cookie + JSON.stringify({...localStorage, ...sessionStorage})") == "{}"
    page.page.reload()
    expect(page.page.get_by_text(HOSTILE).first).to_be_visible()
    page.page.get_by_role("button", name="Log out").click()
    expect(field).to_be_visible()
    assert page.page.context.cookies() == []
    assert {said.split(" (")[0] for said in page.complaints} == {UNAUTHORIZED}
    page.complaints.clear()


UNAUTHORIZED = "error: Failed to load resource: the server responded with a status of 401"


@pytest.mark.long
def test_savepoints_page_shows_the_entries_of_the_catalogue(
    page: Visit, cluster: MiniCluster, shown: SequenceJob
) -> None:
    mark = {"timestamp": 1_795_197_699_641, "passed": False, "by": "a drill", "detail": "no checkpoint", "duration": 1}
    entry = {
        "location": "file:///data/savepoints/savepoint-1", "good": True, "problem": None, "job-id": shown.job_id,
        "job-name": HOSTILE, "taken-by": "airflow", "completion-timestamp": 1_795_197_699_641, "size": 2048,
        "format": "NATIVE", "verified": mark | {"passed": True}, "drilled": mark,
    }  # fmt: skip
    broken = {"location": "file:///data/savepoints/savepoint-2", "good": False, "problem": "_metadata is missing"}
    answer = {
        "directories": ["file:///data/savepoints", "s3://bucket/savepoints"],
        "unread": [{"directory": "s3://away/savepoints", "problem": "it does not answer"}],
        "savepoints": [entry, broken],
    }
    page.page.route("**/savepoints/known", lambda route: route.fulfill(json=answer))
    go(page, cluster, "/savepoints")
    words = (HOSTILE, "airflow", "2 KiB", "passed", "failed", "_metadata is missing", "savepoint-2")
    for word in (*words, "s3://bucket/savepoints", "s3://away/savepoints: it does not answer"):
        expect(page.page.locator("#page")).to_contain_text(word)
    page.shot("catalogue")
