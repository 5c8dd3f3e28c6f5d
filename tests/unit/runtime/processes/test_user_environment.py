"""What user code sees of the environment."""

from __future__ import annotations

from ckpt_runtime.client.session_command import TOKEN_VARIABLE
from ckpt_runtime.processes.user_environment import ALLOCATOR, user_environment


def test_credentials_of_the_engine_are_hidden_and_the_users_own_are_not() -> None:
    hidden = {
        TOKEN_VARIABLE: "1",
        "PYSPARK_GATEWAY_SECRET": "1",
        "PYSPARK_GATEWAY_PORT": "1",
        "PYTHON_WORKER_FACTORY_SECRET": "1",
        "_SPARK_AUTH_SECRET": "1",
        "AIRFLOW__CORE__FERNET_KEY": "1",
        "AIRFLOW_CONN_DB": "1",
    }
    own = {"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "1", "MY_TOKEN": "1", "AIRFLOW_HOME": "/a"}
    assert user_environment(hidden | own) == ALLOCATOR | own


def test_memory_has_no_huge_pages_unless_the_user_says_so() -> None:
    assert user_environment({})["MIMALLOC_ALLOW_THP"] == "0"
    assert user_environment({"MIMALLOC_ALLOW_THP": "1"})["MIMALLOC_ALLOW_THP"] == "1"
