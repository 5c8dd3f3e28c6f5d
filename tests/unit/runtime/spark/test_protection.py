"""What a session asks of Spark before it trusts it, and that no secret is in what Spark makes broadcasts of."""

from __future__ import annotations

import pytest
from pyspark import cloudpickle

from ckpt_runtime.spark.barrier_stage import agent_task
from ckpt_runtime.spark.protection import CONTROL_SECRET, UnprotectedSparkError, check_protected, protect


class Conf:
    """As much of a ``SparkConf``; a real one outside Spark knows nothing of what was given to spark-submit."""

    def __init__(self, **given: str) -> None:
        self.settings = {f"spark.{key.replace('_', '.')}": value for key, value in given.items()}

    def get(self, key: str) -> str | None:
        return self.settings.get(key)

    def setAll(self, pairs: list[tuple[str, str]]) -> None:
        self.settings.update(pairs)

    def setIfMissing(self, key: str, value: str) -> None:
        self.settings.setdefault(key, value)


def protected(**given: str) -> dict[str, str]:
    conf = Conf(**given)
    protect(conf)  # type: ignore[arg-type]
    return conf.settings


@pytest.fixture(autouse=True)
def no_secret_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("_SPARK_AUTH_SECRET", raising=False)


@pytest.mark.parametrize("master", ["local[2]", "yarn", "k8s://https://host"])
def test_every_session_authenticates_and_talks_to_python_over_files(master: str) -> None:
    settings = protected(master=master, python_unix_domain_socket_enabled="false", ui_killEnabled="true")
    assert settings["spark.authenticate"] == "true"
    assert settings["spark.python.unix.domain.socket.enabled"] == "true"
    assert settings["spark.ui.killEnabled"] == "false"
    assert settings["spark.network.crypto.enabled"] == "true"
    assert "spark.authenticate.secret" not in settings, "Spark makes one up"


@pytest.mark.parametrize("value", ["false", "FALSE", "no", ""])
def test_spark_without_authentication_is_refused(value: str) -> None:
    with pytest.raises(UnprotectedSparkError, match=r"spark\.authenticate: "):
        protected(master="local[2]", authenticate=value)


def test_a_standalone_cluster_needs_its_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnprotectedSparkError, match=r"spark\.authenticate\.secret"):
        protected(master="spark://host:7077")
    settings = protected(master="spark://host:7077", authenticate_secret="hidden")
    assert settings["spark.authenticate.secret"] == "hidden"
    monkeypatch.setenv("_SPARK_AUTH_SECRET", "hidden")
    protected(master="spark://host:7077")


def test_cluster_of_the_sessions_own_gets_a_secret_and_encryption_may_be_switched_off() -> None:
    secrets = {protected(master="local-cluster[2,1,1024]")["spark.authenticate.secret"] for _ in range(2)}
    assert len(secrets) == 2
    assert protected(master="yarn", network_crypto_enabled="false")["spark.network.crypto.enabled"] == "false"


def test_secret_is_neither_in_the_shipped_function_nor_in_the_event_log() -> None:
    """It comes with the message that launches the task; without that the task refuses to begin."""
    shipped = cloudpickle.loads(cloudpickle.dumps(agent_task("127.0.0.1", 1, "0")))
    with pytest.raises(RuntimeError, match=CONTROL_SECRET):
        list(shipped(iter(["0"])))
    # It hides properties that are in its configuration too, and whose names match ``spark.redaction.regex``.
    assert CONTROL_SECRET in protected(master="local[2]")
    assert "secret" in CONTROL_SECRET


class Context:
    """As much of a ``SparkContext``."""

    def __init__(self, master: str, application_id: str, authenticate: str = "true") -> None:
        self.master = master
        self.applicationId = application_id
        self._conf = Conf(authenticate=authenticate)

    def getConf(self) -> Conf:
        return self._conf


@pytest.mark.parametrize(
    "context",
    [
        Context("spark://host:7077", "spark-application-1795377964788"),
        Context("local[2]", "local-1795377964788", authenticate="false"),
    ],
)
def test_an_application_that_runs_unprotected_or_not_at_all_is_refused(context: Context) -> None:
    """A standalone master gives ids of its own; an application that it did not take in has none."""
    with pytest.raises(UnprotectedSparkError):
        check_protected(context)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "context",
    [Context("spark://host:7077", "app-20261122200612-0000"), Context("local[2]", "local-1"), Context("yarn", "x")],
)
def test_protected_spark_application_is_accepted(context: Context) -> None:
    check_protected(context)  # type: ignore[arg-type]
