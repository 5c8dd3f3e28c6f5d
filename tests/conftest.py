"""What holds for all tests: a module closes what it opens, and nothing stays in the temporary directory."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from pytest_timeout import Settings
from pytest_timeout import pytest_timeout_set_timer as set_timer

from tests.support.effort import examples
from tests.support.patience import deadline, patient, time_limit
from tests.support.processor_time import ProcessorTimes
from tests.support.run_directory import ENGINES, RUN

if TYPE_CHECKING:
    from tests.support.kafka_broker import KafkaBroker

# A machine that is busy with other tests pauses any of them; the time limits show what is too slow.
settings.register_profile(
    "suite", deadline=None, max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")

# Importing and collecting make what stays: looking for garbage in it again and again is a sixth of their time.
gc.disable()

_LEFT = pytest.StashKey[list[str]]()
_KEPT = pytest.StashKey[Callable[[], None]]()


def pytest_configure(config: pytest.Config) -> None:
    """Which files cost most is part of the report."""
    config.pluginmanager.register(ProcessorTimes())


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> bool:
    """The time limit of a test is one of a quiet machine, too."""
    scaled: bool = set_timer(item, settings._replace(timeout=time_limit(settings.timeout)))
    return scaled


def pytest_collection_finish(session: pytest.Session) -> None:
    """What importing has made stays; without it a collection takes milliseconds."""
    mini_cluster = sys.modules.get("ckpt_runtime.testing.mini_cluster")  # not imported for tests that have none
    if mini_cluster is not None:
        mini_cluster.MiniCluster.time_limit = staticmethod(patient)
        mini_cluster.MiniCluster.deadline = staticmethod(deadline)
        from tests.support import analyses

        analyses.share(Path(os.environ.get(analyses.VARIABLE) or RUN.kept("analyses")))
        _keep_template_of_planning(session)
    _collect_and_keep()
    gc.enable()


def _keep_template_of_planning(session: pytest.Session) -> None:
    """One driver after the other plans in forks of one process, whose imports take longer than most jobs of tests.

    Unit tests look at the templates of a driver that begins, and of one that ends.
    """
    if not any("unit" in item.path.parts for item in session.items):
        from ckpt_runtime.processes.limited_process import drop_templates, keep_templates

        keep_templates()
        session.config.stash[_KEPT] = drop_templates


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What was still in use at the end of some module is looked at once more, and what lies in temporary places."""
    if _KEPT in session.config.stash:
        session.config.stash[_KEPT]()
    gc.unfreeze()
    gc.collect()
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        left = session.config.stash[_LEFT] = RUN.left()
        if any(name.startswith(ENGINES) for name in left):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Also of a run that fails for that alone. The number shows how often Spark was started, which takes most time."""
    if machines := RUN.java_machines():
        terminalreporter.line(f"Spark's Java machines that were started: {machines}")
    left = config.stash.get(_LEFT, [])
    if left:
        terminalreporter.section("left in the temporary directory", red=True)
        terminalreporter.line("\n".join(left))


def pytest_unconfigure() -> None:
    """With what was left there."""
    RUN.close()


def _collect_and_keep() -> None:
    """Finds what is left open, and exempts what lives from the collections to come.

    Tests import Airflow, PySpark and others as they go: looking through these after each module took a second and more,
    longer than most modules.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Tests that are coroutines run on asyncio, each module's on a loop of its own."""
    return "asyncio"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A broker without topics."""
    from tests.support.kafka_broker import kafka_broker

    with kafka_broker(tmp_path_factory.mktemp("kafka")) as started:
        yield started


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    """Sockets and files that a module has not closed are found here, and not while some later module runs.

    The warning of each is an error (``pyproject.toml``), which pytest reports for the module's last test. Of what
    another library leaves open, a module of its tests says so: ``pytest.mark.filterwarnings("ignore:unclosed")``.
    """
    yield
    _collect_and_keep()
