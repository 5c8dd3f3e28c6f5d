"""What holds for all tests: a module closes what it opens, and which of them may run beside each other."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

# A machine that is busy with other tests pauses any of them; what is too slow is for the time limits to tell.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

ONE_BY_ONE = (
    "tests/fault/",
    "tests/system/",
    "tests/integration/test_benchmarks.py",
    "tests/integration/test_rescued_",
)
"""Tests that start Spark or Airflow, or kill processes: each of them fills the machine for a while."""


def run_one_by_one(nodeid: str) -> bool:
    return nodeid.startswith(ONE_BY_ONE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that cannot run beside each other first: everything else can fill the other processes meanwhile."""
    items.sort(key=lambda item: not run_one_by_one(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """With ``--dist=loadfile``: a file stays in one process, and so does all that runs one by one."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return ONE_BY_ONE[0] if run_one_by_one(nodeid) else nodeid.split("::", 1)[0]

    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return Files(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What importing has made stays; without it a collection takes milliseconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    """Sockets and files that nobody has closed are found here, and not while some later module runs.

    The warning of each is an error (``pyproject.toml``), which pytest reports for the module's last test. Of what
    another library leaves open, a module of its tests says so: ``pytest.mark.filterwarnings("ignore:unclosed")``.
    """
    yield
    gc.collect()
