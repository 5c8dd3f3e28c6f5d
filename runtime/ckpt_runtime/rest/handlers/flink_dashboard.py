"""Paths that only Flink's own dashboard requests and that have no content here: JVMs and their profiles.

They are served only below ``/flink/``, with empty answers in Flink's shapes, so that the dashboard's pages are empty
and not broken. Other clients get 404, as for every unknown path.
"""

from __future__ import annotations

import platform
from typing import Any

from fastapi import Depends, Request
from starlette.responses import PlainTextResponse, Response

from ckpt_runtime.rest.errors import ApiError, original_path
from ckpt_runtime.rest.parameters import MetricNames, listed
from ckpt_runtime.rest.responses import flink_router

_NO_OUTPUT = "What processes print is not served here: the driver's lies beside its session file, Spark has the rest.\n"


async def _for_the_dashboard(request: Request) -> None:
    if request.scope.get("ckpt.flink_dashboard") is None:
        raise ApiError(404, f"Not found: {original_path(request)}")


router = flink_router(include_in_schema=False, dependencies=[Depends(_for_the_dashboard)])
_JVMS = ("/jobmanager", "/taskmanagers/{agent}")


@router.get("/jobmanager/environment")
async def environment() -> dict[str, Any]:
    """There is a Python instead of a JVM."""
    version = f"Python {platform.python_version()}, no JVM"
    return {"jvm": {"version": version, "arch": platform.machine(), "options": []}, "classpath": []}


async def _metrics(names: MetricNames = None) -> list[dict[str, str]]:
    return [{"id": name, "value": "0"} for name in listed(names) or ()]


async def _output() -> Response:
    return PlainTextResponse(_NO_OUTPUT)


async def _profiles() -> dict[str, Any]:
    return {"profilingList": []}


router.add_api_route("/taskmanagers/{agent}/metrics", _metrics)
for _path in _JVMS:
    router.add_api_route(f"{_path}/stdout", _output)
    router.add_api_route(f"{_path}/profiler", _profiles)
