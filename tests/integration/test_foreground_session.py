"""A session in the foreground, started by the very command of its pod on Kubernetes, with Spark on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from ckpt_runtime.cli.framework import read_session
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.processes.handles import descendants
from tests.support.kubernetes_manifests import command, driver
from tests.support.patience import patient
from tests.support.processes import living
from tests.support.spark_sessions import wait_until

TOKEN = "the-token-of-the-secret"
POD = {"POD_IP": "127.0.0.1", "POD_NAME": "driver", "POD_NAMESPACE": "streams", "IMAGE": "image"}


@pytest.mark.spark
@pytest.mark.slow
def test_the_command_of_a_pod_serves_its_probes_and_ends_in_good_order(tmp_path: Path) -> None:
    """What is different here: the master, the places of the volumes, ports that are free, and no executors in pods."""
    here = {
        "k8s://https://kubernetes.default.svc": "local[1]",
        "--rest-port=8081": "--rest-port=0",
        "spark.driver.port=7078": "spark.driver.port=0",
        "spark.driver.blockManager.port=7079": "spark.driver.blockManager.port=0",
        "jobmanager.rpc.port=7080": "jobmanager.rpc.port=0",
        "taskmanager.data.port=7100": "taskmanager.data.port=0",
        "/data/": f"{tmp_path}/data/",
        "/tmp/session": f"{tmp_path}/work",
    }
    arguments = command(POD)[1:]
    for there, place in here.items():
        assert any(there in argument for argument in arguments)
        arguments = [argument.replace(there, place) for argument in arguments]
    for setting in ("enabled=true", "compress=false", f"dir={tmp_path}"):
        arguments += ["--conf", f"spark.eventLog.{setting}"]
    session_file = tmp_path / "session.json"
    environment = os.environ | {"CKPT_SESSION_FILE": str(session_file), "CKPT_REST_TOKEN": TOKEN}
    with (tmp_path / "log").open("wb") as log:
        started = [sys.executable, "-m", "ckpt_runtime.cli", *arguments]
        process = subprocess.Popen(started, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: session_file.exists() or process.poll() is not None, "the session to lead")
        info = read_session(session_file)
        assert info is not None, (tmp_path / "log").read_text()
        port = info.rest_url.rpartition(":")[2]
        assert info.rest_url == f"http://ckpt-session:{port}"
        assert (info.driver.pid, info.token) == (process.pid, TOKEN)
        processes = [process.pid, *descendants(process.pid)]
        assert len(processes) > 1, "Spark's JVM"
        base = f"http://127.0.0.1:{port}"
        for kind in ("startup", "readiness", "liveness"):
            answer = httpx.get(base + driver()[f"{kind}Probe"]["httpGet"]["path"], timeout=60)
            assert answer.status_code == 200
            assert TOKEN not in answer.text
        assert httpx.get(f"{base}/overview", timeout=60).status_code == 401
        with CkptClient(base, token=TOKEN) as client:
            assert client.cluster_overview().slots_total == 1
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(patient(60))
    assert code == 0
    wait_until(lambda: not living(processes), "Spark's JVM and all others to end", 30)
    assert not session_file.exists()
    assert list(tmp_path.glob("*.conf")) == list(tmp_path.glob("*.options.json")) == []
    texts = [file.read_text() for file in tmp_path.glob("eventlog*/events*")]
    events = [json.loads(line) for text in texts for line in text.splitlines()]
    names = [event["App Name"] for event in events if event["Event"] == "SparkListenerApplicationStart"]
    assert names == ["ckpt-session"]
