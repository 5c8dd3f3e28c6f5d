"""The OpenAPI document: it describes what is served, and its examples are true."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import jsonschema
import pytest
from fastapi.routing import APIRoute
from starlette.responses import PlainTextResponse

from ckpt_runtime.rest.app import create_app
from ckpt_runtime.rest.event_stream import EventStreamResponse
from ckpt_runtime.rest.responses import FlinkResponse
from tests.support import rest_examples
from tests.unit.runtime.rest.conftest import Send, send_to, sender
from tests.unit.runtime.rest.fake_gateway import FakeGateway

DOCUMENT = create_app(FakeGateway(), token=None).openapi()
OPERATIONS = [
    (method.upper(), path, operation)
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
]
NAMES = [f"{method} {path}" for method, path, _ in OPERATIONS]


def test_document_describes_the_served_paths(send: Send) -> None:
    assert send("GET", "/openapi.json").json() == DOCUMENT
    patch = DOCUMENT["paths"]["/jobs/{jobid}/checkpoints/configuration"]["patch"]
    schema = patch["requestBody"]["content"]["application/json"]["schema"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["checkpointInterval"]["minimum"] == 10
    assert set(patch["responses"]) == {"200", "400", "401", "403", "404", "408", "409", "413", "503"}
    assert all("422" not in operation["responses"] for _, _, operation in OPERATIONS)


def test_every_function_answers_in_flinks_way() -> None:
    """Each router says so: the application takes over what they have made of their functions."""
    routes = create_app(FakeGateway(), token=None).routes
    assert {route.response_class for route in routes if isinstance(route, APIRoute)} == {
        FlinkResponse,
        EventStreamResponse,
        PlainTextResponse,
    }


def test_openapi_document_describes_the_token() -> None:
    secured = sender(create_app(FakeGateway(), token="t"))(
        "GET", "/openapi.json", headers={"authorization": "Bearer t"}
    )
    assert secured.json()["security"] == [{"bearer": []}]


def test_the_examples_are_what_the_application_answers() -> None:
    """``make docs`` writes the file again after a change of the answers."""
    assert files("ckpt_runtime.rest").joinpath("examples.json").read_text("utf-8") == rest_examples.text()


@pytest.mark.parametrize(("method", "path", "operation"), OPERATIONS, ids=NAMES)
def test_every_operation_has_examples_that_fit_their_schemas(method: str, path: str, operation: dict[str, Any]) -> None:
    for status, answer in operation["responses"].items():
        (content,) = answer["content"].values()
        examples = [item["value"] for item in content.get("examples", {}).values()] or [content["example"]]
        for example in examples:
            jsonschema.validate(example, {**content["schema"], "components": DOCUMENT["components"]})
        assert status.startswith("2") or list(examples[0]) == ["errors"]
    for parameter in operation.get("parameters", []):
        if parameter["in"] == "path" and parameter["name"] != "jarid":
            assert parameter["schema"]["examples"]


@pytest.mark.parametrize(("method", "path", "operation"), OPERATIONS, ids=NAMES)
def test_examples_of_bodies_are_accepted(method: str, path: str, operation: dict[str, Any]) -> None:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    for example in content.get("examples", {}).values():
        jsonschema.validate(example["value"], content["schema"])
        fake = rest_examples.dispatcher()
        fake.jobs[rest_examples.RUNNING].savepoint_directory = "file:///data/savepoints"
        if path.endswith(("/run", "/drill")):
            del fake.jobs[rest_examples.RUNNING]
        url = rest_examples.Call(method, path).path
        status = send_to(fake)(method, url, json=example["value"]).status_code
        assert status in (200, 202), example


def test_schema_of_an_answer_requires_what_is_always_sent_and_not_what_depends_on_the_state() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert {"jid", "restore-drill", "plan", "warnings"} <= set(schemas["JobDetails"]["required"])
    assert not {"lineage", "incarnation"} & set(schemas["JobDetails"]["required"])
    assert set(schemas["Savepoint"]["required"]) == {"location", "good"}
    assert "external_path" not in schemas["Checkpoint"]["required"]
    assert schemas["CompletedSubtask"]["properties"]["className"] == {"enum": ["completed"]}
