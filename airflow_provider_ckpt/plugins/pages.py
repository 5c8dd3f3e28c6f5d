"""The plugin: the job manager's pages inside Airflow. Every process of Airflow loads it; it imports next to nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from airflow.plugins_manager import AirflowPlugin

from airflow_provider_ckpt.links import PAGES_PREFIX, pages_path

_Message = MutableMapping[str, Any]


async def serve(
    scope: _Message, receive: Callable[[], Awaitable[_Message]], send: Callable[[_Message], Awaitable[None]]
) -> None:
    """The application behind the pages, made at the first request."""
    from airflow_provider_ckpt.plugins.application import application

    await application()(scope, receive, send)


class CkptPlugin(AirflowPlugin):
    """Adds *Checkpoints* to the menu, and serves the pages to users that may read the connection."""

    name = "ckpt"
    fastapi_apps = [{"app": serve, "url_prefix": PAGES_PREFIX, "name": "ckpt"}]  # noqa: RUF012 - Airflow's own type
    external_views = [  # noqa: RUF012
        {
            "name": "Checkpoints",
            "href": pages_path(),
            "destination": "nav",
            "category": "browse",
            "url_route": "ckpt",
        }
    ]
