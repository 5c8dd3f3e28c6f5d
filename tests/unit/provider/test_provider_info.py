"""The provider's metadata, against Airflow's own schemas and against what really exists."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import airflow
import jsonschema
import pytest

import airflow_provider_ckpt
from airflow_provider_ckpt.get_provider_info import get_provider_info
from airflow_provider_ckpt.links import JOB_LINKS

PACKAGE = Path(airflow_provider_ckpt.__file__).parent
INFO = get_provider_info()


def schema(name: str) -> Any:
    return json.loads((Path(airflow.__file__).parent / name).read_text())


def resolve(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def test_provider_info_satisfies_airflows_schemas() -> None:
    jsonschema.validate(INFO, schema("provider_info.schema.json"))
    full = schema("provider.yaml.schema.json")
    for key in set(INFO) & set(full["properties"]):
        document = {"definitions": full["definitions"], **full["properties"][key]}
        jsonschema.validate(INFO[key], document)


@pytest.mark.parametrize("folder", ["operators", "sensors", "hooks", "triggers"])
def test_every_public_module_is_listed_and_every_listed_module_exists(folder: str) -> None:
    (entry,) = INFO[folder]
    for module in entry["python-modules"]:
        import_module(module)
    private = {"__init__", "base", "watching"}
    if folder != "triggers":
        private |= {"operation", "connection", "program", "upgrade_steps"}
    there = {f"airflow_provider_ckpt.{folder}.{path.stem}" for path in (PACKAGE / folder).glob("*.py")}
    assert set(entry["python-modules"]) == {name for name in there if name.rpartition(".")[2] not in private}


@pytest.mark.row("air.1")
def test_the_hook_fits_its_connection_type() -> None:
    (connection,) = INFO["connection-types"]
    hook = resolve(connection["hook-class-name"])
    assert hook.conn_type == connection["connection-type"] == "ckpt"
    assert hook.hook_name == connection["hook-name"]
    assert hook.default_conn_name == "ckpt_default"
    assert hook(**{hook.conn_name_attr: "other"}).ckpt_conn_id == "other"


def test_every_link_is_listed() -> None:
    assert [resolve(path) for path in INFO["extra-links"]] == [type(link) for link in JOB_LINKS]


@pytest.mark.row("air.5")
def test_the_scheme_of_assets_has_its_functions() -> None:
    (scheme,) = INFO["asset-uris"]
    assert scheme["schemes"] == ["ckpt"]
    asset = resolve(scheme["factory"])(ckpt_conn_id="c", job="j", snapshots="checkpoints", extra={"a": 1})
    assert (asset.uri, asset.extra) == ("ckpt://c/j/checkpoints", {"a": 1})
    assert resolve(scheme["handler"])(urlsplit(asset.uri)).geturl() == asset.uri


def test_versions_agree() -> None:
    assert INFO["versions"] == [airflow_provider_ckpt.__version__]


def test_the_metadata_imports_nothing_of_airflow() -> None:
    code = (
        "import sys; from airflow_provider_ckpt.get_provider_info import get_provider_info; get_provider_info();"
        "sys.exit(any(name.partition('.')[0] in ('airflow', 'httpx', 'ckpt_runtime') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False).returncode == 0


def test_the_provider_knows_the_runtime_through_client_and_contract_only() -> None:
    """And which keys hold a secret, which both sides have to agree on; the files of its pages, which Airflow shows; one
    module finds leaders.

    The plugin runs where Airflow's own tables are at hand, tasks do not.
    """
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name == "ckpt_runtime.leader_retrieval":
                    assert path == PACKAGE / "hooks" / "ckpt.py"
                elif name.startswith("ckpt_runtime") and name not in ("ckpt_runtime.secret_keys", "ckpt_runtime.web"):
                    assert f"{name}.".startswith(("ckpt_runtime.client.", "ckpt_runtime.contract.")), path
                own = () if path.parent.name == "plugins" else ("airflow.models", "airflow.utils")
                assert not name.startswith(("pyspark", *own)), path


def test_configuration_defaults_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow_provider_ckpt import arguments

    options = INFO["config"]["ckpt"]["options"]
    assert options["deferrable"]["default"] is None
    assert arguments.deferrable() is True
    assert str(arguments.configured_seconds("poll_interval")) == options["poll_interval"]["default"]
    assert str(arguments.configured_seconds("defer_after")) == options["defer_after"]["default"]
    monkeypatch.delenv("AIRFLOW__CKPT__MIN_DEFERRAL")
    assert str(arguments.configured_seconds("min_deferral")) == options["min_deferral"]["default"]
    assert str(arguments.configured_seconds("wait_timeout")) == options["wait_timeout"]["default"]


@pytest.mark.parametrize(
    ("ckpt", "operators", "expected"),
    [
        (None, None, True),
        (None, "False", False),
        (None, "True", True),
        ("False", None, False),
        ("False", "True", False),
        ("True", "False", True),
    ],
)
def test_airflows_variable_for_deferrable_counts_unless_the_providers_own_is_set(
    monkeypatch: pytest.MonkeyPatch, ckpt: str | None, operators: str | None, expected: bool
) -> None:
    from airflow.sdk.configuration import conf

    from airflow_provider_ckpt import arguments
    from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
    from airflow_provider_ckpt.sensors.job import JobStatusSensor

    variables = {"AIRFLOW__CKPT__DEFERRABLE": ckpt, arguments.DEFAULT_DEFERRABLE: operators}
    for name, value in variables.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert conf.getboolean("operators", "default_deferrable") is (operators == "True"), "false is Airflow's own default"
    assert arguments.deferrable() is expected
    assert TakeSavepointOperator(task_id="t", job="j").deferrable is expected
    assert JobStatusSensor(task_id="s", job="j").deferrable is expected


def test_airflow_discovers_an_installed_provider(tmp_path: Path) -> None:
    """In a process of its own, with the entry point that an installation writes."""
    info = tmp_path / "airflow_provider_ckpt-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: airflow-provider-ckpt\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[apache_airflow_provider]\nprovider_info=airflow_provider_ckpt.get_provider_info:get_provider_info\n"
        "[airflow.plugins]\nckpt=airflow_provider_ckpt.plugins.pages:CkptPlugin\n"
    )
    code = """
import json
from airflow.providers_manager import ProvidersManager
from airflow.sdk import Asset
from airflow.sdk.configuration import conf
manager = ProvidersManager()
fields = [name for name in manager.connection_form_widgets if name.startswith("extra__ckpt__")]
print(json.dumps([
    "airflow-provider-ckpt" in manager.providers,
    manager.hooks["ckpt"].hook_class_name,
    sorted(fields),
    manager.field_behaviours["ckpt"]["relabeling"]["password"],
    conf.getfloat("ckpt", "poll_interval"),
    sorted(name for name in manager.extra_links_class_names if "ckpt" in name),
    Asset("CKPT://ckpt_default/orders of today/savepoints/").uri,
]))
"""
    path = f"{PACKAGE.parent}:{PACKAGE.parent / 'runtime'}:{tmp_path}"
    environment = {"PYTHONPATH": path, "AIRFLOW_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found[:2] == [True, "airflow_provider_ckpt.hooks.ckpt.CkptHook"]
    fields = ("browser_address", "ca_file", "ha_cluster_id", "ha_dir", "timeout", "verify")
    assert found[2] == [f"extra__ckpt__{name}" for name in fields]
    links = sorted(f"airflow_provider_ckpt.links.{type(link).__name__}" for link in JOB_LINKS)
    assert found[3:] == ["Bearer token", 2.0, links, "ckpt://ckpt_default/orders%20of%20today/savepoints"]
