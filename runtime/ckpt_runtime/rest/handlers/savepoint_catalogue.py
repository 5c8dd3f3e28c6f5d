"""The savepoint catalogue: the savepoints in a directory, the latest good one, and marks of verifications and drills.

Flink has no such catalogue.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ckpt_runtime.rest.bodies import Body, Flag, Location, Note, OneOf, Within, body_of, spelled
from ckpt_runtime.rest.clock import now_ms
from ckpt_runtime.rest.openapi import errors, json_body
from ckpt_runtime.rest.parameters import Gateway, SavepointDirectory, SavepointsOfJob
from ckpt_runtime.rest.responses import flink_router
from ckpt_runtime.rest.shapes import savepoints as shapes
from ckpt_runtime.storage.savepoint_entry import Mark, MarkKind

router = flink_router(prefix="/savepoints", tags=["savepoints"])

_MAX_DURATION_MS = 10 * 365 * 86_400_000


class SavepointMarkRequest(Body):
    """What came of a verification or a restore drill of one savepoint."""

    path: Location = spelled("savepoint-path", "savepointPath")
    kind: Annotated[MarkKind, OneOf(MarkKind)]
    passed: Flag
    by: Note | None = None
    detail: Note = ""
    duration_ms: Annotated[int, Within(0, _MAX_DURATION_MS)] | None = Field(default=None, validation_alias="duration")


_MARK_BODY = json_body(
    SavepointMarkRequest,
    {
        "a drill that passed": {
            "savepoint-path": "file:/data/savepoints/savepoint-fa461a-5dcf0ae7b2f1",
            "kind": "DRILL",
            "passed": True,
            "by": "airflow: drills/restore",
            "detail": "RUNNING after 4.1 s, 3 checkpoints after 9.8 s",
            "duration": 9800,
        },
        "a verification that failed": {
            "savepoint-path": "file:/data/savepoints/savepoint-fa461a-5dcf0ae7b2f1",
            "kind": "VERIFICATION",
            "passed": False,
            "detail": "operator 'totals': the file is missing",
        },
    },
)


@router.get("", responses=errors(400, 404, 409))
async def listing(
    gateway: Gateway, directory: SavepointDirectory = None, job: SavepointsOfJob = None
) -> dict[str, Any]:
    """Savepoints below a directory."""
    return shapes.savepoint_list(await gateway.list_savepoints(directory, job))


@router.get("/known", responses=errors(400))
async def known(gateway: Gateway, job: SavepointsOfJob = None) -> dict[str, Any]:
    """Savepoints below every directory that the session knows."""
    return shapes.known_savepoints(await gateway.known_savepoints(job))


@router.get("/latest", responses=errors(400, 404, 409))
async def latest(gateway: Gateway, directory: SavepointDirectory = None, job: SavepointsOfJob = None) -> dict[str, Any]:
    """The latest good savepoint."""
    return shapes.savepoint(await gateway.latest_savepoint(directory, job))


@router.post("/marks", responses=errors(400, 404, 408, 409, 413), openapi_extra=_MARK_BODY)
async def mark(
    gateway: Gateway, body: Annotated[SavepointMarkRequest, body_of(SavepointMarkRequest)]
) -> dict[str, Any]:
    """Note the result of a verification or drill."""
    result = Mark(now_ms(), body.passed, body.by, body.detail, body.duration_ms)
    return shapes.savepoint(await gateway.mark_savepoint(body.path, body.kind, result))
