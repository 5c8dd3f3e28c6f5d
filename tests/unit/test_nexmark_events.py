"""The events of the Nexmark benchmark: published proportions, and no dependence on how they are read."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from benchmarks.harness import BenchmarkError
from benchmarks.nexmark.chart import bars, write_chart
from benchmarks.nexmark.flink.peer import distribution
from benchmarks.nexmark.generator import EVENT, EVENTS_PER_S, GROUP, KINDS, START_US, Generator, place_of
from benchmarks.nexmark.pipeline.events import NexmarkSource, Share
from ckpt_runtime.sources import Split, SplitRows

OPTIONS = {"events": "5000", "eventsPerSplit": "2000", "splitsPerRange": "2"}


def read(split: Split, position: Any, most_rows: int) -> list[SplitRows]:
    reader = NexmarkSource(OPTIONS).open_reader(EVENT, subtask=0, parallelism=1)
    reader.add(split, position)
    found = []
    while (rows := reader.read(most_rows)) is not None:
        found.append(rows)
    return found


def table(parts: list[SplitRows]) -> pa.Table:
    return pa.Table.from_batches([part.batch for part in parts if part.batch is not None])


def test_events_with_a_rate_are_read_when_they_are_due(tmp_path: Path) -> None:
    begin = tmp_path / "begin"
    options = OPTIONS | {"rate": "1000", "begin": str(begin)}
    reader = NexmarkSource(options).open_reader(EVENT, subtask=0, parallelism=1)
    reader.add(Split("0", asdict(Share(0, GROUP, 2_000))), None)
    assert reader.read(5_000) is None
    begin.write_text(str(time.time() - 0.5))
    rows = reader.read(5_000)
    assert rows is not None
    assert rows.position >= 500
    begun = float(begin.read_text())
    assert rows.position <= (time.time() - begun) * 1_000


def test_events_have_the_published_proportions_and_references_to_rows_that_exist_or_will_soon() -> None:
    events = pa.Table.from_batches([Generator().events(0, 100_000)])
    events.validate(full=True)
    assert pc.value_counts(events["event_type"]).to_pylist() == [
        {"values": 0, "counts": 2_000},
        {"values": 1, "counts": 6_000},
        {"values": 2, "counts": 92_000},
    ]
    for number, name in enumerate(("person", "auction", "bid")):
        assert pc.all(pc.equal(pc.is_valid(events[name]), pc.equal(events["event_type"], number))).as_py()
    bids = events["bid"].combine_chunks().drop_null().flatten()
    auctions, bidders = (np.asarray(bids[at]) for at in range(2))
    assert (auctions.min(), bidders.min()) == (1_000, 1_000)
    assert auctions.max() < 1_000 + 6_000 + 10
    assert bidders.max() < 1_000 + 2_000 + 10
    assert 0.45 < np.mean(auctions % 100 == 0) < 0.6
    assert 0.7 < np.mean(bidders % 100 == 1) < 0.8
    ids = events["person"].combine_chunks().drop_null().field("id")
    assert sorted(ids.to_pylist()) == list(range(1_000, 3_000))


def test_arrival_differs_from_event_time_within_a_group_only() -> None:
    events = Generator().events(0, 3 * GROUP)
    times = pc.coalesce(*(pc.struct_field(events[kind], "dateTime") for kind in KINDS))
    numbers = (np.asarray(times.cast(pa.int64())) - START_US) * EVENTS_PER_S // 1_000_000
    assert np.array_equal(place_of(numbers), np.arange(3 * GROUP))
    assert not np.array_equal(numbers, np.sort(numbers))
    for group in range(3):
        own = numbers[group * GROUP : (group + 1) * GROUP]
        assert np.array_equal(np.sort(own), np.arange(group * GROUP, (group + 1) * GROUP))


def test_events_are_the_same_for_batches_of_any_size_and_from_any_position() -> None:
    split = Split("1000", asdict(Share(1_000, 2 * GROUP, 2_000)))
    whole = read(split, None, 100_000)
    assert [(rows.position, rows.ended) for rows in whole] == [(2000, True)]
    groups = [Generator().events(first, GROUP) for first in (1_000, 3_000)]
    assert table(whole).to_pylist() == pa.Table.from_batches(groups).to_pylist()
    small = read(split, None, 300)
    assert table(small).to_pylist() == table(whole).to_pylist()
    assert [rows.ended for rows in small] == [False] * (len(small) - 1) + [True]
    again = read(split, small[2].position, 700)
    assert table(again).to_pylist() == table(small[3:]).to_pylist()


def test_enumerator_finds_each_event_once_across_a_restore() -> None:
    source = NexmarkSource(OPTIONS)
    first = source.open_enumerator(EVENT, None, bounded=True)
    splits = list(first.discover())
    second = source.open_enumerator(EVENT, first.snapshot(), bounded=True)
    splits += second.discover()
    assert not second.discover()
    found = [Share(**split.description) for split in splits]
    assert found == [Share(0, 2_000, 2_000), Share(1_000, 2_000, 2_000), Share(4_000, 2_000, 1_000)]


@pytest.mark.parametrize(("name", "value"), [("events", "1500"), ("eventsPerSplit", "10"), ("eventsPerSecond", "0")])
def test_option_that_is_not_a_number_of_whole_groups_is_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*{value}"):
        NexmarkSource({name: value})


def test_chart_shows_the_queries_that_a_peer_has_run_with_the_ratio_to_each(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    beside_one = {"events_per_s_core": 900_000, "peer_events_per_s_core": 300_000}
    runs = {
        "a peer": {"q0": beside_one, "q6": {"events_per_s_core": 1}},
        "another": {"q0": {"events_per_s_core": 800_000, "peer_events_per_s_core": 180_000}},
    }
    assert bars(runs) == [("q0", [900.0, 300.0, 180.0])]
    write_chart(tmp_path / "nexmark.svg", runs, "a note")
    text = (tmp_path / "nexmark.svg").read_text()
    assert all(f"<!-- {shown} -->" in text for shown in ("3.0×", "5.0×", "a peer", "another"))
    assert "<!-- q6 -->" not in text


def test_flink_is_the_given_distribution_otherwise_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = [tmp_path / "given", tmp_path / "home"]
    for home in homes:
        (home / "lib").mkdir(parents=True)
        (home / "lib" / "flink-dist-2.3.0.jar").touch()
    monkeypatch.setenv("FLINK_HOME", str(homes[1]))
    assert distribution(str(homes[0])) == homes[0]
    assert distribution(None) == distribution(str(tmp_path)) == homes[1]
    monkeypatch.delenv("FLINK_HOME")
    with pytest.raises(BenchmarkError, match=f"--flink-dir or FLINK_HOME .{tmp_path}.: give a Flink distribution"):
        distribution(str(tmp_path))
