"""Requests made from the OpenAPI document, right and wrong ones: no 5xx, documented answers, no change by a refusal."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from schemathesis import GenerationMode, checks
from schemathesis.core.parameters import ParameterLocation
from schemathesis.specs.openapi import checks as openapi_checks

from ckpt_runtime.rest.app import create_app
from tests.fuzz.budget import LONG, budget
from tests.fuzz.contents import contents
from tests.support.rest_examples import NEW, PIPELINE, RUNNING, dispatcher
from tests.unit.runtime.rest.fake_gateway import VERTICES

APP = create_app(dispatcher(), token=None, max_upload_bytes=100_000)
APP.state.event_streams.end()  # each stream ends with what there is
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP, headers={"host": "localhost"})
KNOWN = {"jobid": RUNNING, "vertexid": VERTICES[0], "jarid": PIPELINE, "checkpointid": "2", "triggerid": "b" * 31 + "1"}
CHECKS = (
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
)

pytestmark = pytest.mark.timeout(3600 if LONG else 600)


def aim(case: schemathesis.Case) -> None:
    """Puts ids that exist into most paths: made-up ones end in 404 before anything else is looked at."""
    for name, value in list(case.path_parameters.items()):
        if name in KNOWN and str(value)[:1] not in "89abcdef":
            case.path_parameters[name] = KNOWN[name]


def exchange(case: schemathesis.Case) -> Any:
    """Sends it and checks what holds for every request. A dispatcher that a request has changed serves no other one."""
    aim(case)
    gateway = APP.state.dispatcher
    before = contents(gateway)
    response = case.call(base_url="http://localhost/v1")
    case.validate_response(response, checks=CHECKS)
    if response.status_code >= 300:
        assert list(response.json()) == ["errors"]
        assert contents(gateway) == before
    elif case.method != "GET":
        APP.state.dispatcher = dispatcher()
    return response


@SCHEMA.parametrize()
@budget(3)
def test_any_request(case: schemathesis.Case) -> None:
    exchange(case)


@pytest.mark.row("571.1")
@pytest.mark.row("571.8")
@SCHEMA.include(path="/jobs/{jobid}/checkpoints/configuration", method="PATCH").parametrize()
@budget(30)
def test_checkpoint_configuration_takes_what_is_documented_and_nothing_else(case: schemathesis.Case) -> None:
    """JSON Schema takes 1.0 for an integer, the API does not: a client that sends it may have computed too much."""
    case.path_parameters["jobid"] = NEW
    response = exchange(case)
    body = case.meta.components.get(ParameterLocation.BODY) if case.meta is not None else None
    if case.method != "PATCH" or body is None:
        return
    floats = isinstance(case.body, dict) and any(isinstance(value, float) for value in case.body.values())
    wrong = body.mode is GenerationMode.NEGATIVE or floats
    assert response.status_code == (400 if wrong else 200), case.body
