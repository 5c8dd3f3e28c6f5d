"""A job manager's real REST application over an in-memory dispatcher, on a real port; and tasks as Airflow runs them.

Airflow itself is imported with a home of its own, so that no test reads or writes a person's.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

import pytest
from starlette.types import Message, Receive, Scope, Send

from tests.support.run_directory import RUN

os.environ["AIRFLOW_HOME"] = str(RUN.kept("airflow"))
os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"
# There is no scheduler here that could misread an early event.
os.environ["AIRFLOW__CKPT__MIN_DEFERRAL"] = "0"

from ckpt_runtime.client.errors import Unreachable
from ckpt_runtime.jobmaster.event_log import EventType
from ckpt_runtime.rest import server as rest_server
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.rest.event_stream import EventStreams
from tests.support.patience import patient
from tests.unit.runtime.rest.fake_gateway import FakeGateway

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.exceptions import TaskDeferred

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[3]
JOB = "fa461ac280c9aa36bde4a060aa97618c"


@dataclass
class Fault:
    """The next ``times`` requests that match get ``status`` instead of an answer, whether ``carried_out`` or not."""

    pattern: str
    status: int
    times: int = 1
    carried_out: bool = False
    says: str = "a fault of the test"


@dataclass
class Awaited:
    """Something to call before the last of ``times`` requests that match is answered."""

    pattern: str
    times: int
    call: Callable[[], None]


async def _nobody(_: Message) -> None:
    """An answer that is lost."""


class JobManager:
    """The REST API of a :class:`FakeGateway` on a loopback port; may be stopped and started again there.

    It has no streams of events, as Flink has none, unless ``streams`` is set: then the test publishes them.
    """

    def __init__(self) -> None:
        self._app = self._open = create_app(FakeGateway(), token=None)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: rest_server.EmbeddedServer | None = None
        self.port = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything, run one job, and serve."""
        self.gateway = FakeGateway()
        self.gateway.add_job(JOB)
        self._app = self._open
        self._app.state.dispatcher = self.gateway
        self.received: list[str] = []
        self.faults: list[Fault] = []
        self.streams = False
        self._awaited: list[Awaited] = []
        self.start()

    def at_request(self, number: int, pattern: str, call: Callable[[], None]) -> None:
        """Call in the server's thread before the request of that number, from 1, which matches is answered."""
        self._awaited.append(Awaited(pattern, number, call))

    def ask_for(self, token: str) -> None:
        """Refuse requests without this token, as a session that was started with it."""
        self._app = create_app(self.gateway, token=token)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        line = f"{scope['method']} {scope['path']}"
        self.received.append(line)
        fault = next((fault for fault in self.faults if fault.times > 0 and re.search(fault.pattern, line)), None)
        if fault is None and scope["path"] == "/events" and not self.streams:
            fault = Fault("/events", 404)
        if fault is None:
            for awaited in self._awaited:
                if re.search(awaited.pattern, line):
                    awaited.times -= 1
                    if awaited.times == 0:
                        awaited.call()
            await self._app(scope, receive, send)
            return
        fault.times -= 1
        if fault.carried_out:
            await self._app(scope, receive, _nobody)
        await send({"type": "http.response.start", "status": fault.status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps({"errors": [fault.says]}).encode()})

    def start(self) -> None:
        if self._server is None:
            self._app.state.event_streams = EventStreams()
            # uvicorn tells the kinds of applications apart by looking at plain functions
            application = partial(JobManager.serve, self)
            starting = rest_server.start(application, "127.0.0.1", self.port, interface="asgi3")
            self._server, self.port = self._run(starting)

    def stop(self) -> None:
        if self._server is not None:
            self._loop.call_soon_threadsafe(self._app.state.event_streams.end)
            self._run(rest_server.stop(self._server))
            self._server = None

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=60)
        self._loop.close()

    def happens(self, kind: EventType, job_id: str = JOB, **data: Any) -> None:
        """Publish an event."""
        self._loop.call_soon_threadsafe(self.gateway.events.publish, kind, job_id, {"jobid": job_id, **data})

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=patient(60))

    def count(self, request: str) -> int:
        """How often a request (``POST /jobs/:id/savepoints``, the job's id written out) came."""
        return self.received.count(request)

    @property
    def connection(self) -> str:
        return json.dumps({"conn_type": "ckpt", "host": "127.0.0.1", "port": self.port})


@contextmanager
def unanswered() -> Iterator[threading.Semaphore]:
    """Give a semaphore that each request of this process without an answer releases."""
    failed = threading.Semaphore(0)
    make = Unreachable.__init__

    def counting(error: Unreachable, *given: Any, **named: Any) -> None:
        make(error, *given, **named)
        failed.release()

    with patch.object(Unreachable, "__init__", counting):
        yield failed


@contextmanager
def away(job_manager: JobManager, requests: int = 2) -> Iterator[None]:
    """The job manager does not listen until that many requests have failed."""

    def come_back() -> None:
        for _ in range(requests):
            failed.acquire(timeout=patient(60))
        job_manager.start()

    with unanswered() as failed:
        job_manager.stop()
        back = threading.Thread(target=come_back)
        back.start()
        try:
            yield
        finally:
            failed.release(requests)
            back.join()


_FORKS = """
import json, os, sys, traceback
import airflow.triggers.base, httpx
from airflow.sdk import DAG, BaseHook, BaseOperator, BaseSensorOperator, Param, task

for line in sys.stdin:
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.dup2(writing, 1)
        try:
            exec(json.loads(line), {})
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    with open(reading) as output:
        said = output.read()
    print(json.dumps([os.waitpid(child, 0)[1], said]), flush=True)
"""


@pytest.fixture(scope="session")
def alone() -> Iterator[Callable[[str], str]]:
    """Run code where nothing is imported but what every DAG file imports of Airflow; gives what it prints.

    Each run is a fork of one process: to import Airflow takes seconds.
    """
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}"}
    command, pipe = [sys.executable, "-c", _FORKS], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:

        def run(code: str) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(code) + "\n")
            process.stdin.flush()
            status, said = json.loads(next(line for line in process.stdout if line.startswith("[")))
            assert status == 0, said
            return str(said)

        yield run
        process.communicate()


@pytest.fixture(scope="session")
def shared_job_manager() -> Iterator[JobManager]:
    manager = JobManager()
    yield manager
    manager.close()


@pytest.fixture
def job_manager(shared_job_manager: JobManager, monkeypatch: pytest.MonkeyPatch) -> JobManager:
    """A job manager with one running job, which the connection ``ckpt_default`` points to."""
    shared_job_manager.reset()
    monkeypatch.setenv("AIRFLOW_CONN_CKPT_DEFAULT", shared_job_manager.connection)
    return shared_job_manager


@pytest.fixture
def commands_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ckpt snapshot`` runs here, and not in a process that imports everything; other tests start that process."""
    from airflow_provider_ckpt.processes import SnapshotProcess
    from ckpt_runtime.cli.main import main

    def ended(_: SnapshotProcess, *arguments: str) -> tuple[int, str, str]:
        output, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(output), redirect_stderr(errors):
            code = main(arguments)
        return code, output.getvalue(), errors.getvalue()

    monkeypatch.setattr(SnapshotProcess, "_ended", ended)


class Store(dict[str, Any]):
    """Airflow's task state store, as far as it can be seen from a task: values go through JSON."""

    def set(self, key: str, value: Any, *, retention: Any = None) -> None:
        self[key] = json.loads(json.dumps(value))

    def delete(self, key: str) -> None:
        self.pop(key, None)


@dataclass
class TaskInstance:
    id: uuid.UUID = field(default_factory=uuid.uuid4)
    dag_id: str = "dag"
    run_id: str = "run"
    task_id: str = "t"
    map_index: int = -1
    xcoms: dict[str, Any] = field(default_factory=dict)

    def xcom_push(self, key: str, value: Any) -> None:
        self.xcoms[key] = value


@dataclass
class Task:
    """One task over its tries: the store stays, every try has an id of its own."""

    store: Store | None = field(default_factory=Store)
    map_index: int = -1

    def context(self) -> dict[str, Any]:
        return {"ti": TaskInstance(map_index=self.map_index), "task_state_store": self.store}


@pytest.fixture
def task() -> Task:
    return Task()


@pytest.fixture
def airflow_says(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Have Airflow, which is not here to be asked, say in what state a test's task is; None: it is gone."""
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    def says(state: str | None) -> None:
        found = {} if state is None else {"run": {"t": state}}
        monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(lambda **_: found))

    return says


def fire(deferred: TaskDeferred) -> dict[str, Any]:
    """The event of a deferral's trigger, which is rebuilt from JSON first."""
    from airflow.sdk.module_loading import import_string

    path, kwargs = deferred.trigger.serialize()
    rebuilt = import_string(path)(**json.loads(json.dumps(kwargs)))
    assert rebuilt.serialize() == (path, kwargs)

    async def first() -> Any:
        async for event in rebuilt.run():
            return event
        raise AssertionError("the trigger ended without an event")

    payload = asyncio.run(first()).payload
    found: dict[str, Any] = json.loads(json.dumps(payload))
    return found


def deferral(operator: BaseOperator, context: dict[str, Any]) -> TaskDeferred:
    """What an operator that does not end at once hands over to its trigger."""
    from airflow.sdk.exceptions import TaskDeferred

    with pytest.raises(TaskDeferred) as caught:
        operator.execute(context)
    return caught.value


def finish(operator: BaseOperator, context: dict[str, Any], *, start: Callable[[], Any] | None = None) -> Any:
    """Run an operator to its end as Airflow would: execute or ``start``, its trigger after a round trip, and so on."""
    from airflow.sdk.exceptions import TaskDeferred

    step = start or (lambda: operator.execute(context))
    while True:
        try:
            return step()
        except TaskDeferred as deferred:
            event = fire(deferred)
            method = deferred.method_name

        def step(event: dict[str, Any] = event, method: str = method) -> Any:
            return operator.resume_execution(method, {"event": event}, context)


async def until(condition: Callable[[], bool]) -> None:
    """Wait on the loop; for a minute of a quiet machine at most."""
    async with asyncio.timeout(patient(60)):
        while not condition():
            await asyncio.sleep(0.01)


def run_at_hubs(work: Coroutine[Any, Any, None]) -> None:
    """Nothing is left behind: no hub, no task, and the loop has closed the sockets."""
    from airflow_provider_ckpt import event_hub

    async def whole() -> None:
        await work
        assert event_hub._hubs == {}
        await asyncio.sleep(0)
        await until(lambda: len(asyncio.all_tasks()) == 1)
        await asyncio.sleep(0.01)

    asyncio.run(whole())
