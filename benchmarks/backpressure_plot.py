"""The runs of backpressure as a table and as two charts: checkpoint duration and rows per second over the sleep.

Charts need matplotlib (extra ``benchmarks``); the table and the points of the charts do not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Run = Mapping[str, Any]

DURATION = "checkpoint_ms_p50"
THROUGHPUT = "rows_per_s"
COLOURS = {"none": "#7f7f7f", "aligned": "#d62728", "unaligned": "#1f77b4", "timeout": "#2ca02c"}
_COLUMNS = (
    "rows_per_s",
    "checkpoints",
    "checkpoint_ms_p50",
    "checkpoint_ms_p95",
    "checkpoint_ms_max",
    "checkpointed_bytes_p50",
    "persisted_inflight_bytes_p50",
    "queued_bytes_max",
    "peak_rss_mb",
)


@dataclass(frozen=True, slots=True)
class Point:
    """``value`` at the ``position``-th sleep; a lower bound when ``censored``."""

    position: int
    value: float
    censored: bool


def sleeps(runs: Sequence[Run]) -> list[float]:
    """The sleeps that were measured, ascending."""
    return sorted({float(run["sleep_ms"]) for run in runs})


def lines(runs: Sequence[Run], key: str) -> dict[str, list[Point]]:
    """The points of each policy's line; runs that failed, or have no such figure, have none."""
    positions = {sleep: position for position, sleep in enumerate(sleeps(runs))}
    found: dict[str, list[Point]] = {}
    for run in sorted(runs, key=lambda run: float(run["sleep_ms"])):
        if run.get(key) is not None:
            censored = key == DURATION and bool(run.get("censored"))
            point = Point(positions[float(run["sleep_ms"])], float(run[key]), censored)
            found.setdefault(run["policy"], []).append(point)
    return found


def table(runs: Sequence[Run]) -> str:
    """The runs in Markdown; durations that are lower bounds have a sign in front of them."""
    head = ("sleep ms", "policy", *_COLUMNS)
    rows = [head, ("---",) * len(head)]
    for run in runs:
        if "error" in run:
            cells = [str(run["error"]).replace("|", "\\|"), *[""] * (len(_COLUMNS) - 1)]
        else:
            cells = [_cell(run, column) for column in _COLUMNS]
        rows.append((f"{run['sleep_ms']:g}", str(run["policy"]), *cells))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cell(run: Run, column: str) -> str:
    value = run.get(column)
    if value is None:
        return "-"
    bound = "≥ " if run.get("censored") and column.startswith("checkpoint_ms_") else ""
    return f"{bound}{value:,.0f}"


def write_table(directory: Path, runs: Sequence[Run]) -> None:
    """Writes ``backpressure.json`` and ``backpressure.md`` into the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "backpressure.json").write_text(json.dumps(list(runs), indent=1) + "\n")
    (directory / "backpressure.md").write_text(table(runs) + "\n")


def write_charts(directory: Path, runs: Sequence[Run]) -> None:
    """Writes ``checkpoint_duration`` and ``throughput`` as SVG and PNG into the directory, which is there."""
    labels = [f"{sleep:g}" for sleep in sleeps(runs)]
    _chart(directory / "checkpoint_duration", lines(runs, DURATION), labels, "checkpoint duration, ms (median)")
    _chart(directory / "throughput", lines(runs, THROUGHPUT), labels, "rows per second")


def _chart(path: Path, drawn: Mapping[str, Sequence[Point]], labels: Sequence[str], title: str) -> None:
    """One line per policy over the sleeps, which stand side by side; logarithmic upwards. Open marks: lower bounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = path.name  # the same figures give the same file
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for policy, points in drawn.items():
        colour = COLOURS.get(policy)
        axes.plot([p.position for p in points], [p.value for p in points], color=colour, label=policy, zorder=1)
        for point in points:
            axes.scatter(
                point.position,
                point.value,
                marker="^" if point.censored else "o",
                facecolors="white" if point.censored else colour,
                edgecolors=colour,
                zorder=2,
            )
    if drawn:
        axes.set_yscale("log")
        axes.legend(
            title="policy" + (" (open: at least)" if any(p.censored for q in drawn.values() for p in q) else "")
        )
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlabel("sleep per row, ms")
    axes.set_title(title)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), dpi=120)
    pyplot.close(figure)
