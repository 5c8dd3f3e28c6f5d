"""One Airflow and one job manager for the tests of a module, ended with it: both take from others' time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from demo.airflow_instance import LocalAirflow
from tests.system.airflow_instance import make_airflow
from tests.unit.provider.conftest import JobManager


@pytest.fixture(scope="module")
def shared_job_manager() -> Iterator[JobManager]:
    manager = JobManager()
    yield manager
    manager.close()


@pytest.fixture
def job_manager(shared_job_manager: JobManager) -> JobManager:
    """A job manager with one running job."""
    shared_job_manager.reset()
    return shared_job_manager


@pytest.fixture(scope="module")
def airflow(shared_job_manager: JobManager, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalAirflow]:
    """A healthy Airflow whose connection ``ckpt_default`` leads to the job manager."""
    home = tmp_path_factory.mktemp("airflow")
    with make_airflow(home, {"ckpt_default": shared_job_manager.connection}) as instance:
        instance.wait_healthy(300)
        yield instance
