"""The image and the manifests for Kubernetes, as far as they can be checked without a cluster.

The oracles are Kubernetes' own schemas, the constants in Spark's jars, and the engine's own checks of its options.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ckpt_runtime.cli import session_commands
from ckpt_runtime.cli.main import main
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.network.tls import TlsFilesError, rest_context
from tests.support.certificates import Authority, rest_options
from tests.support.kubernetes_manifests import FOLDER, Json, command, document, documents, driver
from tests.unit.test_packaging import required

PODS = {"POD_IP": "10.0.0.7", "POD_NAME": "ckpt-session-0", "POD_NAMESPACE": "streams", "IMAGE": "registry/ckpt:1"}
DOCS = FOLDER.parents[1] / "docs" / "kubernetes.md"


def spark_jar(name: str) -> zipfile.ZipFile:
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    (jar,) = (Path(spec.origin).parent / "jars").glob(f"{name}_2.13-*.jar")
    return zipfile.ZipFile(jar)


@pytest.mark.parametrize("given", documents(), ids=lambda given: given["kind"])
def test_a_manifest_is_what_the_schema_of_kubernetes_allows(given: Json) -> None:
    kubernetes_validate.validate(given, kubernetes_validate.latest_version(), strict=True)


def test_resources_that_manifests_name_exist() -> None:
    pod = document("Deployment")["spec"]["template"]
    executor = document("Pod")
    assert pod["spec"]["serviceAccountName"] == document("ServiceAccount")["metadata"]["name"]
    binding = document("RoleBinding")
    assert binding["roleRef"]["name"] == document("Role")["metadata"]["name"]
    assert [subject["name"] for subject in binding["subjects"]] == [pod["spec"]["serviceAccountName"]]
    claim = document("PersistentVolumeClaim")["metadata"]["name"]
    for spec in (pod["spec"], executor["spec"]):
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes["data"]["persistentVolumeClaim"]["claimName"] == claim
        assert {mount["name"] for mount in spec["containers"][0]["volumeMounts"]} == set(volumes)
    assert document("Deployment")["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert document("Service")["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    among = document("NetworkPolicy")["spec"]["podSelector"]["matchLabels"].items()
    assert among <= pod["metadata"]["labels"].items()
    assert among <= executor["metadata"]["labels"].items()


def test_ports_probes_and_command_agree() -> None:
    options = dict(argument.split("=", 1) for argument in command(PODS) if "=" in argument)
    ports = {port["name"]: str(port["containerPort"]) for port in driver()["ports"]}
    assert ports == {
        "rest": options["--rest-port"],
        "driver": options["spark.driver.port"],
        "blocks": options["spark.driver.blockManager.port"],
        "control": options["jobmanager.rpc.port"],
    }
    first, count = int(options["taskmanager.data.port"]), int(options["taskmanager.data.port-count"])
    assert count >= 3 * int(options["spark.executor.cores"]), "a worker, its spare and one that ends in each slot"
    assert not {str(port) for port in range(first, first + count)} & set(ports.values())
    (service,) = document("Service")["spec"]["ports"]
    assert (service["targetPort"], str(service["port"])) == ("rest", ports["rest"])
    assert {driver()[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "readiness", "liveness")} == {"rest"}


def test_key_from_a_secret_as_the_page_mounts_it_has_a_mode_that_the_engine_takes(tmp_path: Path) -> None:
    [example] = [block for block in re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL) if "secret:" in block]
    volume = yaml.safe_load(example)["volumes"][0]
    pod = copy.deepcopy(document("Deployment"))
    spec = pod["spec"]["template"]["spec"]
    spec["volumes"].append(volume)
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    assert spec["securityContext"]["fsGroup"], "lets the group read the files of a secret"
    made = Authority(tmp_path).issue("session")
    configuration = Configuration(rest_options(made))
    for mode in (volume["secret"]["defaultMode"], volume["secret"]["defaultMode"] | 0o440):
        made.key.chmod(mode)
        assert rest_context(configuration) is not None
    made.key.chmod(0o644)
    with pytest.raises(TlsFilesError, match="0644"):
        rest_context(configuration)


def test_the_driver_uses_the_template_the_account_and_the_secret_that_the_page_makes() -> None:
    executor = document("Pod")
    options = dict(argument.split("=", 1) for argument in command(PODS) if "=" in argument)
    folder, _, name = options["spark.kubernetes.executor.podTemplateFile"].rpartition("/")
    assert (FOLDER / name).exists()
    assert {mount["mountPath"] for mount in driver()["volumeMounts"] if mount["name"] == "executor-template"} == {
        folder
    }
    (container,) = executor["spec"]["containers"]
    assert options["spark.kubernetes.executor.podTemplateContainerName"] == container["name"]
    token = next(variable for variable in driver()["env"] if variable["name"] == "CKPT_REST_TOKEN")
    secret = token["valueFrom"]["secretKeyRef"]
    assert f"create secret generic {secret['name']} --from-literal={secret['key']}=" in DOCS.read_text()
    assert {"pods", "configmaps"} <= set(document("Role")["rules"][0]["resources"])


def test_the_command_of_the_driver_is_one_that_ckpt_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With options of the engine that exist, and may have these values."""
    taken: dict[str, Any] = {}

    def become_session(master: str, slots: int | None, **settings: Any) -> None:
        taken.update(settings, master=master, slots=slots)
        raise OSError("far enough")

    monkeypatch.setattr(session_commands, "become_session", become_session)
    monkeypatch.setenv("CKPT_SESSION_FILE", str(tmp_path / "session.json"))
    program, *arguments = command(PODS)
    assert program == "ckpt"
    assert main(arguments) == 1
    assert taken["master"].startswith("k8s://https://")
    assert taken["spark_conf"]["spark.driver.host"] == PODS["POD_IP"]
    assert taken["conf"]["high-availability.type"] == "filesystem"


def test_settings_of_spark_in_manifests_exist() -> None:
    given = {argument.partition("=")[0] for argument in command(PODS) if argument.startswith("spark.")}
    known = b""
    for jar, classes in (
        ("spark-core", "org/apache/spark/internal/config/"),
        ("spark-kubernetes", "org/apache/spark/"),
    ):
        with spark_jar(jar) as archive:
            known += b"".join(archive.read(name) for name in archive.namelist() if name.startswith(classes))
    unknown = {key for key in given if key.encode() not in known}
    assert unknown - {"spark.app.name"} == set()  # a constant of another room


def test_executors_are_started_with_sparks_command(tmp_path: Path) -> None:
    """Every variable that the entry point reads is one that Spark sets."""
    script = FOLDER / "entrypoint.sh"
    read = set(re.findall(r"\$(SPARK_\w+)", script.read_text())) - {"SPARK_HOME"}
    with spark_jar("spark-kubernetes") as archive:
        constants = archive.read("org/apache/spark/deploy/k8s/Constants$.class")
    assert {name for name in read if name.encode() not in constants} == set()
    assert b"SPARK_JAVA_OPT_" in constants
    tini = tmp_path / "tini"
    tini.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    tini.chmod(0o755)
    options = {"SPARK_JAVA_OPT_0": "-Da=b c", "SPARK_JAVA_OPT_1": "-Dd", "SPARK_HOME": "/opt/spark"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **{name: name.lower() for name in read}, **options}

    def run(*arguments: str) -> list[str]:
        done = subprocess.run([script, *arguments], env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    executor = run("executor")
    assert executor[:5] == ["-s", "--", "java", "-Da=b c", "-Dd"]
    main_class = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
    with spark_jar("spark-kubernetes") as archive:
        backend = archive.read(f"{main_class.replace('.', '/')}$.class")
    flags = [argument for argument in executor[executor.index(main_class) :] if argument.startswith("--")]
    assert [flag for flag in flags if flag.encode() not in backend] == []
    assert run("ckpt", "session", "start") == ["-s", "--", "ckpt", "session", "start"]


def test_the_image_installs_extras_that_the_engine_has() -> None:
    (extras,) = re.findall(r"/src/runtime\[([\w,]+)\]", (FOLDER / "Dockerfile").read_text())
    assert set(extras.split(",")) <= set(required("EXTRAS_REQUIRE", "runtime/setup.py"))
    assert "session" in extras.split(",")
