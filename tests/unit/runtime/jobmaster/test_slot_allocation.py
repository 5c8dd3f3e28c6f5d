"""Which requests are served, which wait, how many slots are launched, and which cores workers get."""

from __future__ import annotations

import random

import pytest

from ckpt_runtime.jobmaster.slots import Allocation, Supply, allocate, choose_cores, shortage, turn_after


@pytest.mark.parametrize(
    ("missing", "supply", "expected"),
    [
        pytest.param([2], Supply(2, 0, 0), Allocation((0,), (), 0), id="ready slots are granted"),
        pytest.param([3], Supply(1, 1, 5), Allocation((), (), 1), id="only what does not start already is launched"),
        pytest.param([3, 2], Supply(0, 0, None), Allocation((), (), 5), id="without a limit all are launched"),
        pytest.param([20, 1], Supply(2, 0, 6), Allocation((1,), (0,), 0), id="a request without room holds nothing"),
        pytest.param([8, 1], Supply(6, 0, 0), Allocation((1,), (0,), 0), id="a request without free slots neither"),
        pytest.param([2, 1], Supply(1, 1, 0), Allocation((), (1,), 0), id="what starts is reserved in order"),
        pytest.param([2, 1], Supply(1, 1, 1), Allocation((), (), 1), id="and more is launched for the next one"),
        pytest.param([0, 1], Supply(0, 0, 0), Allocation((0,), (1,), 0), id="a job that lacks none needs none"),
        pytest.param([], Supply(3, 1, 1), Allocation((), (), 0), id="no executor is launched without demand"),
    ],
)
def test_allocation(missing: list[int], supply: Supply, expected: Allocation) -> None:
    assert allocate(missing, supply) == expected


@pytest.mark.parametrize(
    ("missing", "reserving", "expected"),
    [
        pytest.param([6, 1], [0], Allocation((), (0, 1), 0, 0), id="what is free is reserved"),
        pytest.param([1, 6, 1, 1], [1], Allocation((0,), (1, 2, 3), 0, 1), id="those before it are served"),
        pytest.param(
            [6, 7, 1], [1], Allocation((), (0, 1, 2), 0, 1), id="a request that lets others pass stays behind"
        ),
        pytest.param([6, 0], [0], Allocation((1,), (0,), 0, 0), id="a job that lacks none keeps its slots"),
        pytest.param([4, 1], [0], Allocation((0,), (1,), 0), id="a request that is served reserves nothing"),
    ],
)
def test_free_slots_are_reserved_for_a_request_in_its_turn(
    missing: list[int], reserving: list[int], expected: Allocation
) -> None:
    assert allocate(missing, Supply(4, 0, 0), reserving) == expected


def test_turns_alternate_and_are_of_equal_length() -> None:
    assert turn_after(0, 60) == (False, 60)
    assert turn_after(59, 60) == (False, 1)
    assert turn_after(60, 60) == (True, 60)
    assert turn_after(130, 60) == (False, 50)
    assert turn_after(1e9, 0) == (False, None)


def _waits(seed: int, interval_s: float, seconds: int = 3_000) -> int | None:
    """How long a job waits for 6 of 8 slots while small jobs keep coming that run for 10 to 50 s; None for ever."""
    generator = random.Random(seed)
    running: list[int] = [generator.randint(10, 50) for _ in range(8)]
    small = 0
    for second in range(seconds):
        running = [left - 1 for left in running if left > 1]
        small += generator.random() < 0.5
        reserving = [0] if turn_after(second, interval_s).reserves else []
        granted = allocate([6] + [1] * small, Supply(8 - len(running), 0, 0), reserving).granted
        if 0 in granted:
            return second
        small -= len(granted)
        running += [generator.randint(10, 50) for _ in granted]
    return None


@pytest.mark.parametrize("seed", range(3))
def test_large_job_starts_in_its_first_turn_among_any_number_of_small_ones(seed: int) -> None:
    waited = _waits(seed, 60)
    assert waited is not None
    assert waited < 120
    assert _waits(seed, 0) is None, "without turns it would wait for ever, so that this test proves something"


def test_shortage_distinguishes_a_cluster_that_is_too_small_from_a_busy_one() -> None:
    assert shortage(20, 8, 6) == "needs 20 slots, the cluster has 8"
    assert shortage(8, 8, 6) == "needs 8 slots, 6 of the cluster's 8 are free"
    assert shortage(1, 0, 0) == "needs 1 slot, the cluster has 0"


class TestCores:
    @pytest.mark.parametrize(
        ("workers", "taken", "cores"),
        [
            ([("a", (0, 1)), ("b", (4, 5)), ("a", (0, 1))], [], [0, 4, 1]),  # a core each on every host
            ([("a", (0, 1, 2))], [("a", 0), ("a", None), ("b", 1)], [1]),  # those of other jobs are not given away
            ([("a", (0, 1)), ("b", (0, 1))], [("a", 1), ("a", None)], [None, 0]),  # more workers than cores
            ([("a", (0, 1)), ("a", (2, 3)), ("a", (0, 1))], [], [None, None, None]),
            ([("a", (0, 1)), ("a", (2, 3))], [], [0, 2]),  # executors of one host
            ([("a", ())], [], [None]),  # a host of unknown cores
        ],
    )
    def test_workers_are_bound_to_cores_where_every_worker_of_the_host_has_one(self, workers, taken, cores) -> None:
        assert choose_cores(workers, taken) == cores
