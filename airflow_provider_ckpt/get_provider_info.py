"""The provider's metadata for Airflow.

Airflow evaluates it while its own configuration initialises, so this module imports nothing, reads nothing and cannot
fail; the entry point must name the function in this module.
"""

from __future__ import annotations

from typing import Any

_PACKAGE = "airflow_provider_ckpt"
_INTEGRATION = "ckpt"
_REST_API = "https://nightlies.apache.org/flink/flink-docs-stable/docs/ops/rest_api/"


def _modules(folder: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
    modules = [f"{_PACKAGE}.{folder}.{name}" for name in names]
    return [{"integration-name": _INTEGRATION, "python-modules": modules}]


_OPERATORS = (
    *("cancel", "checkpoint", "checkpoint_config", "deploy", "dispose", "drill", "job_config", "listing", "rescale"),
    *("retention", "savepoint", "session", "snapshots", "stop", "submit", "suspend", "upgrade"),
)
_SENSORS = ("checkpoint", "health", "job")
_TRIGGERS = ("alerts", "snapshots", "wait")

_CONNECTION: dict[str, Any] = {
    "connection-type": "ckpt",
    "hook-class-name": f"{_PACKAGE}.hooks.ckpt.CkptHook",
    "hook-name": "Checkpoint runtime (ckpt, Flink REST)",
    "ui-field-behaviour": {
        "hidden-fields": ["login"],
        "relabeling": {"schema": "Scheme", "password": "Bearer token"},
        "placeholders": {"schema": "http or https", "host": "127.0.0.1", "port": "8081"},
    },
    "conn-fields": {
        "verify": {
            "label": "Verify the server's certificate",
            "description": "Only for https.",
            "schema": {"type": ["boolean", "null"], "default": True},
        },
        "ca_file": {
            "label": "CA bundle",
            "description": "Path of a PEM file with the certificate authorities to trust instead of the system's.",
            "schema": {"type": ["string", "null"]},
        },
        "ha_dir": {
            "label": "HA directory",
            "description": (
                "The session's high-availability.storageDir, instead of a host: a path or URL that Airflow's "
                "machines can read. The provider finds the current leader there, even after another job manager has "
                "taken over."
            ),
            "schema": {"type": ["string", "null"]},
        },
        "ha_cluster_id": {
            "label": "HA cluster id",
            "description": "The session's high-availability.cluster-id in that directory.",
            "schema": {"type": ["string", "null"], "default": "default"},
        },
        "timeout": {
            "label": "Request timeout in seconds",
            "description": "Time limit of one request. It does not limit the wait for a job or an operation.",
            "schema": {"type": ["number", "null"], "minimum": 1, "maximum": 600, "default": 30},
        },
        "browser_address": {
            "label": "Address for browsers",
            "description": (
                "Address to which the links of tasks lead, such as https://ckpt.example.com. If empty, they lead to "
                "the pages in Airflow."
            ),
            "schema": {"type": ["string", "null"]},
        },
    },
}

_CONFIG: dict[str, Any] = {
    "ckpt": {
        "description": "Defaults of the operators and sensors for checkpointing stream jobs.",
        "options": {
            "deferrable": {
                "description": (
                    "Whether tasks wait in the triggerer. A task's own argument has precedence. Where this is not "
                    "set, the variable AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE decides if it is there; else tasks wait "
                    "in the triggerer. default_deferrable in airflow.cfg does not count: Airflow writes false there."
                ),
                "version_added": "0.1.0",
                "type": "boolean",
                "example": "True",
                "default": None,
            },
            "poll_interval": {
                "description": "Seconds between two polls, if there is no stream of events. A task's own argument "
                "has precedence.",
                "version_added": "0.1.0",
                "type": "float",
                "example": None,
                "default": "2.0",
            },
            "defer_after": {
                "description": "Seconds that a task waits in its worker before it is deferred; 0 defers at once.",
                "version_added": "0.1.0",
                "type": "float",
                "example": None,
                "default": "3.0",
            },
            "min_deferral": {
                "description": (
                    "Minimum number of seconds before a trigger fires its event. Airflow may take five seconds to "
                    "notice that the process of a deferred task has ended, and fails a task that was resumed "
                    "sooner."
                ),
                "version_added": "0.1.0",
                "type": "float",
                "example": None,
                "default": "6.0",
            },
            "wait_timeout": {
                "description": (
                    "Seconds that an operator waits for its operation. A task's own argument has precedence. There is "
                    "no limit for the completion of a job."
                ),
                "version_added": "0.1.0",
                "type": "float",
                "example": None,
                "default": "600.0",
            },
            "request_retry_timeout": {
                "description": "Seconds for which a request is repeated while the job manager is unreachable or not "
                "the leader.",
                "version_added": "0.1.0",
                "type": "float",
                "example": None,
                "default": "180.0",
            },
        },
    }
}


def get_provider_info() -> dict[str, Any]:
    """The provider's metadata, in the shape of Airflow's ``provider_info.schema.json``."""
    return {
        "package-name": "airflow-provider-ckpt",
        "name": "Checkpoint runtime",
        "description": "Operates stream jobs with checkpoints and savepoints through a Flink-compatible REST API.",
        "versions": ["0.1.0"],
        "integrations": [{"integration-name": _INTEGRATION, "external-doc-url": _REST_API, "tags": ["service"]}],
        "operators": _modules("operators", _OPERATORS),
        "sensors": _modules("sensors", _SENSORS),
        "hooks": _modules("hooks", ("ckpt",)),
        "triggers": _modules("triggers", _TRIGGERS),
        "asset-uris": [
            {
                "schemes": ["ckpt"],
                "handler": f"{_PACKAGE}.assets.sanitize_uri",
                "factory": f"{_PACKAGE}.assets.create_asset",
                "to_openlineage_converter": f"{_PACKAGE}.lineage.convert_asset_to_openlineage",
            }
        ],
        "task-decorators": [{"name": "ckpt", "class-name": f"{_PACKAGE}.decorators.ckpt.ckpt_task"}],
        "notifications": [f"{_PACKAGE}.notifications.ckpt.CkptNotifier"],
        "connection-types": [_CONNECTION],
        "extra-links": [f"{_PACKAGE}.links.CkptJobLink", f"{_PACKAGE}.links.CkptCheckpointsLink"],
        "plugins": [{"name": "ckpt", "plugin-class": f"{_PACKAGE}.plugins.pages.CkptPlugin"}],
        "config": _CONFIG,
    }
