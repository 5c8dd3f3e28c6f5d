"""Asynchronous operations by trigger id: started once, polled until they are forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from ckpt_runtime.jobmaster import operations
from ckpt_runtime.jobmaster.gateway_values import OperationKind, OperationNotFound, OperationStatus
from ckpt_runtime.jobmaster.operations import OperationFailure, OperationStore

SAVEPOINT = OperationKind.SAVEPOINT
DONE = OperationStatus(True, location="file:///sp")


@asynccontextmanager
async def opened() -> AsyncIterator[OperationStore]:
    store = OperationStore()
    yield store
    await store.stop()


async def settle() -> None:
    """Lets everything that is ready run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def done() -> OperationStatus:
    return DONE


async def test_a_known_trigger_starts_nothing() -> None:
    async with opened() as store:
        started = []

        async def work() -> OperationStatus:
            started.append(True)
            return DONE

        assert not store.knows(SAVEPOINT, "j", "t")
        assert store.start(SAVEPOINT, "j", "t", work) == "t"
        assert store.knows(SAVEPOINT, "j", "t")
        assert not store.knows(SAVEPOINT, "j", None)
        assert store.start(SAVEPOINT, "j", "t", work) == "t"
        await settle()
        assert len(started) == 1
        store.start(SAVEPOINT, "other", "t", work)
        store.start(OperationKind.CHECKPOINT, "j", "t", work)
        await settle()
        assert len(started) == 3


@pytest.mark.parametrize(
    ("error", "traced"), [(OperationFailure("it expired"), False), (ValueError("it expired"), True)]
)
async def test_a_failure_is_an_outcome_with_its_cause(error: Exception, traced: bool) -> None:
    """The trace of an expected failure leads through nothing that a client knows."""

    async with opened() as store:

        async def work() -> OperationStatus:
            raise error

        trigger = store.start(SAVEPOINT, "j", None, work)
        await settle()
        failure = store.status(SAVEPOINT, "j", trigger).failure
        assert failure is not None
        assert failure.message == "it expired"
        assert failure.exception.endswith(type(error).__name__)
        assert failure.stack_trace.strip().endswith(f"{type(error).__name__}: it expired")
        assert ("raise error" in failure.stack_trace) == traced


async def test_an_unknown_one_is_not_found() -> None:
    async with opened() as store:
        store.start(SAVEPOINT, "j", "t", done)
        for kind, job, trigger in (
            (SAVEPOINT, "j", "u"), (SAVEPOINT, "k", "t"), (SAVEPOINT, None, "t"), (OperationKind.CHECKPOINT, "j", "t"),
        ):  # fmt: skip
            with pytest.raises(OperationNotFound, match=trigger):
                store.status(kind, job, trigger)


async def test_outcomes_expire_and_running_operations_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(operations, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async with opened() as store:
        gate = asyncio.Event()

        async def work() -> OperationStatus:
            await gate.wait()
            return DONE

        store.start(SAVEPOINT, "j", "short", done)
        store.start(SAVEPOINT, "j", "long", work)
        await settle()
        now[0] += operations.STORE_DURATION_S
        assert store.status(SAVEPOINT, "j", "short") == DONE
        now[0] += 1
        with pytest.raises(OperationNotFound):
            store.status(SAVEPOINT, "j", "short")
        assert not store.status(SAVEPOINT, "j", "long").completed
        gate.set()


async def test_too_many_outcomes_push_the_oldest_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MAX_OPERATIONS", 2)

    async with opened() as store:
        for trigger in "abcd":
            store.start(SAVEPOINT, "j", trigger, done)
            await settle()
        assert store.status(SAVEPOINT, "j", "d") == DONE
        assert [trigger for trigger in "abcd" if store.knows(SAVEPOINT, "j", trigger)] == ["c", "d"]


async def test_running_operations_are_not_displaced_by_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client was promised an answer, however many other operations have come since."""
    monkeypatch.setattr(operations, "MAX_OPERATIONS", 1)

    async with opened() as store:
        gate = asyncio.Event()

        async def work() -> OperationStatus:
            await gate.wait()
            return DONE

        for trigger in ("long", "longer"):
            store.start(SAVEPOINT, "j", trigger, work)
        for trigger in "abc":
            store.start(SAVEPOINT, "j", trigger, done)
            await settle()
        for trigger in ("long", "longer"):
            assert not store.status(SAVEPOINT, "j", trigger).completed
        gate.set()


@pytest.mark.parametrize("begun", [False, True])
async def test_stopping_ends_what_runs_and_says_so(begun: bool) -> None:
    async with opened() as store:

        async def work() -> OperationStatus:
            await asyncio.Event().wait()
            raise AssertionError

        trigger = store.start(SAVEPOINT, "j", None, work)
        if begun:
            await settle()
        await store.stop()
        status = store.status(SAVEPOINT, "j", trigger)
        assert status.failure is not None
        assert "shutting down" in status.failure.message
