"""Joins of random streams under random watermarks, snapshots and changes of parallelism, against the definition."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_runtime.graph.output_schemas import JOIN_TYPES
from ckpt_runtime.graph.specs import JoinSpec
from ckpt_runtime.operators.operator import MAX_WATERMARK
from tests.support.effort import examples
from tests.support.joins import LEFT, RIGHT, Expected, JoinJob, Row, join_spec, text

Maker = Callable[[Random], Any]
KEYS: list[list[tuple[str, pa.DataType, Maker]]] = [
    [("k", pa.int64(), lambda choice: choice.randrange(5))],
    [("k", pa.float64(), lambda choice: choice.choice([0.0, -0.0, 1.5, -2.0]))],
    [("k", pa.string(), lambda choice: choice.choice(["", "a", "bb", "a longer key than the others"]))],
    [("k", pa.int32(), lambda choice: choice.randrange(2)), ("m", pa.string(), lambda choice: choice.choice("xy"))],
]
PAYLOADS: list[tuple[pa.DataType, Maker]] = [
    (pa.int64(), lambda choice: choice.randrange(10)),
    (pa.string(), lambda choice: "ab" * choice.randrange(3)),
    (
        pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))]),
        lambda choice: {"a": choice.randrange(3), "b": ["x"] * choice.randrange(3)},
    ),
]


def stream(how: str, seed: int) -> tuple[JoinSpec, list[tuple[str, Any]]]:
    """A join, and steps: rows of a side, a watermark, or a snapshot that is restored at a parallelism."""
    choice = Random(seed)
    keys = choice.choice(KEYS)
    payload, content = choice.choice(PAYLOADS)
    bounds = sorted((choice.randint(-6, 6), choice.randint(-6, 6)))
    within = None if how == "inner" and choice.random() < 0.2 else (bounds[0], bounds[1])
    spec = join_spec(how, within, [(name, kind) for name, kind, _ in keys], payload)
    now = 0
    steps: list[tuple[str, Any]] = []
    for kind in choice.choices("LRWS", [3, 3, 2, 1], k=choice.randint(1, 20)):
        if kind == "W":
            now += choice.randint(0, 6)
            steps.append((kind, now))
        elif kind == "S":
            steps.append((kind, choice.randint(1, 4)))
        else:
            steps.append((kind, [_row(choice, kind.lower(), keys, content, now) for _ in range(choice.randint(1, 8))]))
    return spec, [*steps, ("S", 2), ("W", MAX_WATERMARK)]


def _row(choice: Random, side: str, keys: list[tuple[str, pa.DataType, Maker]], content: Maker, now: int) -> Row:
    row = {name: None if choice.random() < 0.1 else make(choice) for name, _, make in keys}
    row[f"{side}t"] = None if choice.random() < 0.05 else now + choice.randint(-3, 12)
    row[side] = None if choice.random() < 0.2 else content(choice)
    return row


@pytest.mark.parametrize(("backend_type", "most"), [("hashmap", 100), ("rocksdb", 8)])
@pytest.mark.parametrize("how", JOIN_TYPES)
def test_a_join_gives_what_its_definition_says_at_every_moment(how: str, backend_type: str, most: int) -> None:
    """After every step: exactly the rows that must be out are, and the state holds exactly what may still match.

    RocksDB has memory for 1 to 8 rows.
    """

    @settings(deadline=None, max_examples=examples(most))
    @given(st.integers(0, 2**32), st.integers(1, 3))
    def run(seed: int, parallelism: int) -> None:
        spec, steps = stream(how, seed)
        with closing(JoinJob(spec, parallelism, backend_type, 1 + seed % 8)) as job:
            follow(job, Expected(spec), steps)

    def follow(job: JoinJob, expected: Expected, steps: list[tuple[str, Any]]) -> None:
        seen: Counter[str] = Counter()
        joined: dict[Any, list[str]] = defaultdict(list)
        for kind, content in steps:
            rows: list[Row] = []
            if kind == "S":
                job.rescale(content)
            elif kind == "W":
                rows = job.watermark(content)
                expected.advance(content)
            else:
                side = LEFT if kind == "L" else RIGHT
                rows = job.process(side, content)
                expected.process(side, content)
            seen.update(map(text, rows))
            assert seen == expected.output()
            assert job.living == expected.living()
            assert job.late_rows == expected.late
            for row in rows if how == "inner" else ():
                joined[tuple(row[key] for key in job.spec.left.keys)].append(text(row))
        if how == "inner":
            assert joined == expected.pairs_by_key

    run()
