"""Questions that the driver asks worker processes about themselves, and their answers. On the event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import TypeVar

from ckpt_runtime.jobmaster.control_endpoint import AnyPeer, WorkerPeer
from ckpt_runtime.jobmaster.gateway_errors import NotReady
from ckpt_runtime.network.control_messages import (
    RecentLog,
    SampledStacks,
    ThreadDump,
    WorkerAnswer,
    WorkerQuestion,
)
from ckpt_runtime.network.listeners import MalformedMessageError

A = TypeVar("A", ThreadDump, RecentLog, SampledStacks)

ANSWER_TIMEOUT_S = 10.0


class WorkerQuestions:
    """The questions that have no answer yet."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[
            int, tuple[WorkerPeer, type[ThreadDump | RecentLog | SampledStacks], asyncio.Future[WorkerAnswer]]
        ] = {}

    async def ask(
        self,
        peer: WorkerPeer,
        question: Callable[[int], WorkerQuestion],
        answer: type[A],
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> A:
        """``question`` makes the message from its number. Raises NotReady if the worker is silent or lost."""
        number = next(self._numbers)
        future: asyncio.Future[WorkerAnswer] = asyncio.get_running_loop().create_future()
        self._open[number] = (peer, answer, future)
        worker = peer.registration.worker
        try:
            peer.send(question(number))
            async with asyncio.timeout(timeout_s):
                given = await future
        except TimeoutError:
            raise NotReady(f"worker {worker} has not answered within {timeout_s:g} s") from None
        finally:
            del self._open[number]
        assert isinstance(given, answer)
        return given

    def answered(self, peer: AnyPeer, answer: WorkerAnswer) -> None:
        """Takes an answer; a late one is dropped. Raises MalformedMessageError if the peer was not asked for it."""
        if answer.question not in self._open:
            return
        asked, expected, future = self._open[answer.question]
        if asked is not peer or not isinstance(answer, expected):
            raise MalformedMessageError(f"the message {type(answer).__name__} answers no question of this worker")
        if not future.done():
            future.set_result(answer)

    def lost(self, peer: AnyPeer) -> None:
        """Fails the questions to a lost peer with NotReady."""
        for asked, _, future in self._open.values():
            if asked is peer and not future.done():
                future.set_exception(NotReady(f"worker {asked.registration.worker} was lost"))
