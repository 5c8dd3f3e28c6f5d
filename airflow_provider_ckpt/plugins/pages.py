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
    """The application that serves the pages, made at the first request."""
    from airflow_provider_ckpt.plugins.views import application

    await application()(scope, receive, send)


def _view(destination: str, name: str, path: str) -> dict[str, Any]:
    """A tab in addition to Airflow's own; Airflow puts names and ids into the braces."""
    return {
        "name": name,
        "href": f"{pages_path()}of/{path}",
        "destination": destination,
        "url_route": f"ckpt-{destination.replace('_', '-')}",
    }


class CkptPlugin(AirflowPlugin):
    """Adds *Checkpoints* to the menu, tabs with the jobs of a DAG, a run and a task, and a card to the home page.

    The pages are for users that may read the connection, and the DAG.
    """

    name = "ckpt"
    fastapi_apps = [{"app": serve, "url_prefix": PAGES_PREFIX, "name": "ckpt"}]  # noqa: RUF012 - Airflow's own type
    external_views = [  # noqa: RUF012
        {"name": "Checkpoints", "href": pages_path(), "destination": "nav", "category": "browse", "url_route": "ckpt"},
        _view("dag", "Stream jobs", "{DAG_ID}"),
        _view("dag_run", "Stream jobs", "{DAG_ID}/{RUN_ID}"),
        _view("task_instance", "Stream job", "{DAG_ID}/{RUN_ID}/{TASK_ID}/{MAP_INDEX}"),
    ]
    react_apps = [  # noqa: RUF012
        {
            "name": "ckpt jobs with problems",
            "bundle_url": f"{pages_path()}dashboard.js",
            "destination": "dashboard",
            "url_route": "ckpt-jobs-in-trouble",
        }
    ]
