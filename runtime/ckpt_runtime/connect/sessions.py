"""The sessions of Spark Connect clients: their views of streams, options and queries."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from ckpt_runtime.configuration.pipeline_options import PipelineOptions
from ckpt_runtime.connect.listeners import ListenerBus
from ckpt_runtime.connect.queries import Query
from ckpt_runtime.frontend.analysis import ANALYZER
from ckpt_runtime.frontend.capture import Capture, CapturedQuery, Service
from ckpt_runtime.frontend.explain import explanation
from ckpt_runtime.frontend.job import DataSources, JobOptions
from ckpt_runtime.frontend.mapping import spark_columns
from ckpt_runtime.frontend.typed_plan import Analysis, AnalysisNeeded

T = TypeVar("T")

MOST_SESSIONS = 200
"""Maximum number of sessions. Beyond it the least recently used one is dropped; its jobs continue to run."""


class ClientSession:
    """The state of one client's session.

    ``views`` holds the commands that made views of streams, by the views' names, ``starts`` those that started queries,
    by the queries' ids, and ``operations`` the ids of the operations that are answered here and that the client has not
    released. ``listeners`` is the stream of events while the client has listeners.
    """

    def __init__(self) -> None:
        self.options = JobOptions({})
        self.settings: dict[str, str] = {}
        self.views: dict[str, Any] = {}
        self.queries: dict[str, Query] = {}
        self.starts: dict[str, Any] = {}
        self.listeners: ListenerBus | None = None
        self.operations: set[str] = set()
        self._analyses: dict[str, str] = {}
        self._capture = Capture(
            self._analyses,
            lambda source: spark_columns(source, DataSources().resolve),
            self.options.set,
            explain=self._explain,
        )
        self._service = Service(self._capture)
        self._lock = asyncio.Lock()

    def configure(self, key: str, value: str) -> None:
        """Sets an option. Raises PlanError, InvalidOptionError or UnknownOptionError; an error changes nothing."""
        self._service.set(key, value)
        if key.startswith("spark."):
            self.settings[key] = value

    async def analyzed(self, request: Any) -> Any:
        """Answers an ``AnalyzePlanRequest`` about a stream. Raises PlanError for one that cannot be answered."""
        return await self._with_spark(lambda: self._service.methods["AnalyzePlan"](request))

    async def explained(self, start: Any, *, extended: bool) -> str:
        """Returns the plan of a query by the command that started it. Raises PlanError."""

        def explain() -> str:
            capture = self._capture
            query = CapturedQuery(start, capture.analysis_of(capture.request_of(start.input)))
            return self._explain(capture, query, extended)

        return await self._with_spark(explain)

    def _explain(self, capture: Capture, of: Analysis | CapturedQuery, extended: bool) -> str:
        capture.explained.clear()
        parallelism = self.options.effective.get(PipelineOptions.PARALLELISM)
        return explanation(capture, of, DataSources().resolve, parallelism, extended=extended)

    async def add_view(self, request: Any) -> None:
        """Keeps the view of a stream that an ``ExecutePlanRequest`` makes. Raises PlanError for an invalid one."""
        await self._with_spark(lambda: self._service.methods["ExecutePlan"](request))
        self.views[request.plan.command.create_dataframe_view.name] = request.plan.command

    async def _with_spark(self, answer: Callable[[], T]) -> T:
        """Runs ``answer`` repeatedly, with the answers that it needs from Spark, until none is missing."""

        def complete() -> T:
            while True:
                try:
                    return answer()
                except AnalysisNeeded as needed:
                    self._analyses.update(ANALYZER.answer(needed.text))
                    self._capture.forget_questions()

        async with self._lock:
            return await asyncio.to_thread(complete)


class ClientSessions:
    """The sessions by the ids of user and session that each request carries."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[tuple[str, str], ClientSession] = OrderedDict()

    def of(self, request: Any) -> ClientSession:
        """Returns the session of a request, a new one for a new id."""
        key = (request.user_context.user_id, request.session_id)
        session = self._sessions.setdefault(key, ClientSession())
        self._sessions.move_to_end(key)
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def release(self, request: Any) -> None:
        """Drops a session. Its jobs continue to run."""
        session = self._sessions.pop((request.user_context.user_id, request.session_id), None)
        if session is not None and session.listeners is not None:
            session.listeners.remove()
