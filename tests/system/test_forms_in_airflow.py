"""Airflow's own forms in a browser: what people fill in to start the delivered DAGs, and to make a connection."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, expect

from demo.airflow_api import DagRun
from demo.airflow_instance import LocalAirflow
from tests.support.browser import Visit, chromium, open_browser, visit
from tests.support.jobs import SequenceJob
from tests.system.airflow_instance import until
from tests.system.conftest import SLOWLY, Session, every_second

pytestmark = [
    pytest.mark.airflow,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(chromium() is None, reason="there is no Chromium"),
]

PATIENCE_MS = 120_000
"""Airflow's pages are large programs, which a loaded machine takes long to begin."""
DAGS = ("lifecycle", "patch", "restore_drill", "savepoint_now", "scheduled_savepoints", "upgrade")


@pytest.fixture(scope="module")
def opened(airflow: LocalAirflow, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visit]:
    """One browser for the module. What Airflow's own pages complain of is not ours."""
    screenshots = Path(os.environ.get("CKPT_SCREENSHOTS", tmp_path_factory.mktemp("forms") / "screenshots"))
    with open_browser() as browser, visit(browser, screenshots, without=(airflow.base_url,)) as found:
        found.page.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        yield found


def params_of(airflow: LocalAirflow, dag_id: str) -> dict[str, dict[str, Any]]:
    """The schema of each parameter, its description with it."""
    until(lambda: airflow.api.has_dag(dag_id), dag_id)
    found = airflow.api.call("GET", f"/dags/{dag_id}/details")["params"]
    return {name: param["schema"] | {"description": param["description"]} for name, param in found.items()}


def trigger_form(airflow: LocalAirflow, opened: Visit, dag_id: str) -> Locator:
    opened.page.goto(f"{airflow.base_url}/dags/{dag_id}")
    opened.page.get_by_role("button", name="Trigger").first.click()
    form = opened.page.get_by_role("dialog")
    expect(form).to_contain_text(f"Trigger Dag - {dag_id}")
    return form


def open_section(form: Locator, section: str) -> Locator:
    """One is open at a time. Returns what is in it."""
    header = form.get_by_role("button", name=section, exact=True)
    if header.get_attribute("aria-expanded") != "true":
        header.click()
    expect(header).to_have_attribute("aria-expanded", "true")
    return form.locator(f'[id="{header.get_attribute("aria-controls")}"]')


def submit(form: Locator) -> None:
    """By the keyboard: a message about an earlier try may lie over the button."""
    form.get_by_test_id("trigger-dag-submit").press("Enter")


def test_the_names_of_the_delivered_dags() -> None:
    from airflow_provider_ckpt.dags import names

    assert set(names()) == {f"ckpt_{name}" for name in DAGS}


@pytest.mark.long
@pytest.mark.row("air.6")
@pytest.mark.parametrize("name", DAGS)
def test_every_delivered_dag_has_a_form_with_sections_and_descriptions(
    name: str, airflow: LocalAirflow, opened: Visit
) -> None:
    dag_id = f"ckpt_{name}"
    params = params_of(airflow, dag_id)
    form = trigger_form(airflow, opened, dag_id)
    sections: dict[str, list[dict[str, Any]]] = {}
    for param in params.values():
        sections.setdefault(param["section"], []).append(param)
    for section, its in sections.items():
        content = open_section(form, section)
        for param in its:
            expect(content).to_contain_text(param["title"])
            assert param["description"], param
            expect(content).to_contain_text(param["description"])
    opened.shot(f"form-{dag_id}")


@pytest.mark.long
@pytest.mark.row("air.6")
def test_the_form_refuses_a_bad_duration_and_starts_a_run_that_works(
    airflow: LocalAirflow, session: Session, job: SequenceJob, opened: Visit
) -> None:
    job.start(**SLOWLY, configuration=every_second(pipeline__name="job of a form"))
    job.running()
    form = trigger_form(airflow, opened, "ckpt_patch")
    open_section(form, "Job").locator("#element_job").fill("job of a form")
    times = open_section(form, "Times")
    times.locator("#element_interval").fill("5 parsecs")
    times.locator("#element_interval").blur()
    submit(form)
    expect(form).to_contain_text("Invalid input for param interval: '5 parsecs' does not match")
    opened.shot("form-refuses-a-duration")
    before = runs(airflow, "ckpt_patch")
    open_section(form, "Times").locator("#element_interval").fill("350 ms")
    form.locator("#element_interval").blur()
    submit(form)
    (run,) = until(lambda: runs(airflow, "ckpt_patch") - before, "the run")
    opened.page.goto("about:blank")  # Airflow's page would send requests and draw for as long as the run takes
    assert airflow.wait_run(DagRun("ckpt_patch", run), 240) == "success"
    config = job.cluster.of_job(job.job_id, lambda job: job.checkpoint_config())
    assert config.settings.interval_ms == 350


def runs(airflow: LocalAirflow, dag_id: str) -> set[str]:
    """The ids of all runs of a DAG."""
    return {run["dag_run_id"] for run in airflow.api.call("GET", f"/dags/{dag_id}/dagRuns")["dag_runs"]}


def wrong_value(schema: dict[str, Any]) -> str | None:
    """What a person may type into the field and must not; ``None`` where the form has only right values to choose."""
    if "enum" in schema or "boolean" in schema["type"]:
        return None
    if "minimum" in schema:
        return str(schema["minimum"] - 1)
    if "pattern" in schema:
        return "5 parsecs!"
    if schema["type"] == "string" and schema.get("minLength"):
        return ""
    return None


VALID = {"job": "some job"}
"""What a form asks for and has no default for."""


@pytest.mark.long
@pytest.mark.row("air.6")
@pytest.mark.parametrize("name", DAGS)
def test_a_wrong_value_in_any_field_is_refused_with_the_field_the_value_and_what_is_allowed(
    name: str, airflow: LocalAirflow, opened: Visit
) -> None:
    """No run is started. What only the run can know, such as a job that does not exist, its task says."""
    dag_id = f"ckpt_{name}"
    params = params_of(airflow, dag_id)
    known = runs(airflow, dag_id)
    form = trigger_form(airflow, opened, dag_id)

    def type_in(field: str, text: str) -> Locator:
        open_section(form, params[field]["section"])
        element = form.locator(f'[name="element_{field}"]')
        element.fill(text)
        element.blur()
        return element

    for field in VALID.keys() & params.keys():
        type_in(field, VALID[field])
    default = {field: form_value(airflow, dag_id, field) for field in params}
    refused = []
    for field, schema in params.items():
        wrong = wrong_value(schema)
        if wrong is None:
            continue
        element = type_in(field, wrong)
        if "minimum" in schema:  # the field itself does not let it in
            expect(element).not_to_have_value(wrong)
            assert float(element.input_value()) >= schema["minimum"]
        elif not wrong:  # beside the field, and nothing can be started
            expect(open_section(form, schema["section"])).to_contain_text("This field is required")
            expect(form.get_by_test_id("trigger-dag-submit")).to_be_disabled()
        else:
            submit(form)
            expect(form).to_contain_text(f"Invalid input for param {field}: {wrong!r} does not match ")
        refused.append(field)
        type_in(field, VALID.get(field, default[field]))
    opened.shot(f"form-refused-{dag_id}")
    assert refused
    assert runs(airflow, dag_id) == known


def form_value(airflow: LocalAirflow, dag_id: str, field: str) -> str:
    """The default of a field, as it is typed."""
    value = airflow.api.call("GET", f"/dags/{dag_id}/details")["params"][field]["value"]
    return "" if value is None else str(value)


@pytest.mark.row("air.1")
def test_a_connection_is_made_and_tested_by_its_form(airflow: LocalAirflow, session: Session, opened: Visit) -> None:
    page = opened.page
    page.goto(f"{airflow.base_url}/connections")
    page.get_by_role("button", name="Add Connection").click()
    form = page.get_by_role("dialog")
    form.locator("input[name=connection_id]").fill("by_form")
    form.get_by_role("combobox").fill("Checkpoint runtime")
    page.get_by_role("option", name="Checkpoint runtime").click()
    standard = open_section(form, "Standard Fields")
    for field in ("Host", "Bearer token", "Port", "Scheme"):
        expect(standard).to_contain_text(field)
    standard.locator("input[name=host]").fill("127.0.0.1")
    standard.locator("input[name=port]").fill(str(session.port))
    extra = open_section(form, "Extra Fields")
    for field in ("Verify the server's certificate", "CA bundle", "HA directory", "Address for browsers"):
        expect(extra).to_contain_text(field)
    opened.shot("form-connection")
    form.get_by_role("button", name="Save").click()
    row = page.get_by_role("row", name="by_form")
    with page.expect_response(lambda response: response.url.endswith("/connections/test")) as answered:
        row.get_by_role("button", name="Test Connection").click()
    answer = answered.value.json()
    assert answer["status"], answer
    assert f"leader http://127.0.0.1:{session.port}" in answer["message"]
    opened.shot("form-connection-tested")
    airflow.api.call("DELETE", "/connections/by_form")  # others look at all connections of this Airflow
