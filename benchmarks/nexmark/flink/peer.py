"""Flink as a peer: a Java program beside this module makes the same events and runs the queries in Flink SQL.

It runs in one Java process with Flink's cluster inside, as ours runs in its ``MiniCluster``: with the classes of a
Flink distribution, exactly once, a checkpoint per second to files, state in memory, object reuse, and small batches as
in the published configuration of Nexmark. Java is warm after the first run of each query.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from argparse import Namespace
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil  # type: ignore[import-untyped, unused-ignore]
import pyarrow as pa
from pyarrow import csv

from benchmarks.harness import BenchmarkError
from benchmarks.nexmark.flink.queries import QUERIES
from benchmarks.nexmark.generator import EVENTS_PER_S
from benchmarks.nexmark.processes import CpuTime, Timed

CHECKED_EVENTS, CHECKED_PER_S = 40_000, 1_000
"""The events of a compared result and their rate in event time, which has whole milliseconds in Flink."""

_SOURCE = Path(__file__).with_name("Nexmark.java")
_TIMEOUT_S = 1_800
_WARM_EVENTS = 1_000_000
_CLOCK_WINDOW_S = 12
"""How long a compared run of a query by the clock waits for the end of its last window of 10 s."""
_OPENED = ("lang", "net", "io", "nio", "math", "util", "util.concurrent", "time")
_OPTIONS = {
    "execution.checkpointing.interval": "1 s",
    "execution.checkpointing.mode": "EXACTLY_ONCE",
    "execution.checkpointing.checkpoints-after-tasks-finish.enabled": "false",
    "restart-strategy.type": "none",
    "state.backend.type": "hashmap",
    "pipeline.object-reuse": "true",
    "table.exec.mini-batch.enabled": "true",
    "table.exec.mini-batch.allow-latency": "2 s",
    "table.exec.mini-batch.size": "50000",
    "table.optimizer.distinct-agg.split.enabled": "true",
    "taskmanager.memory.managed.size": "512 mb",
    "taskmanager.memory.network.min": "256 mb",
    "taskmanager.memory.network.max": "256 mb",
}


def distribution(directory: str | None) -> Path:
    """The Flink distribution to use: the given one, otherwise that of ``FLINK_HOME``.

    Raises BenchmarkError when neither holds the classes of Flink.
    """
    candidates = [Path(text) for text in (directory, os.environ.get("FLINK_HOME")) if text]
    for candidate in candidates:
        if list((candidate / "lib").glob("flink-dist-*.jar")):
            return candidate.resolve()
    looked = ", ".join(map(str, candidates)) or "neither is given"
    raise BenchmarkError(f"no lib/flink-dist-*.jar in --flink-dir or FLINK_HOME ({looked}): give a Flink distribution")


class FlinkPeer:
    """The Java process. It is started on entering, and ended on leaving."""

    def __init__(self, options: Namespace, directory: Path) -> None:
        self._options = options
        self._directory = directory / "flink"
        self._classpath = f"{self._directory / 'classes'}:{distribution(options.flink_dir)}/lib/*"
        self._warm: set[str] = set()

    def __enter__(self) -> Self:
        self._compile()
        configuration = _OPTIONS | {
            "parallelism.default": str(self._options.parallelism),
            "execution.checkpointing.dir": (self._directory / "checkpoints").as_uri(),
            "io.tmp.dirs": tempfile.gettempdir(),
        }
        opened = [f"--add-opens=java.base/java.{package}=ALL-UNNAMED" for package in _OPENED]
        command = ["java", "-Xmx4g", *opened, "-cp", self._classpath, "Nexmark"]
        command += [f"{key}={value}" for key, value in configuration.items()]
        self._log = (self._directory / "log").open("wb")
        self._java = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, bufsize=1
        )
        self.process = psutil.Process(self._java.pid)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._java.kill()
        self._java.communicate()
        self._log.close()

    def run(self, name: str) -> Timed:
        """Measures a query from when its readers have started to its end, after a shorter run that warms it up."""
        if name not in self._warm:
            self._run(name, min(_WARM_EVENTS, self._options.events), EVENTS_PER_S, None)
            self._warm.add(name)
        return self._run(name, self._options.events, EVENTS_PER_S, None)

    def result(self, name: str, schema: pa.Schema) -> pa.Table:
        """Returns the rows of a query over the compared events, with the types of ``schema``."""
        file = self._directory / f"{name}.tsv"
        self._run(name, CHECKED_EVENTS, CHECKED_PER_S, file)
        fields, types = csv.ParseOptions(delimiter="\t", quote_char=False), csv.ConvertOptions(column_types=schema)
        return csv.read_csv(file, parse_options=fields, convert_options=types)

    def _run(self, name: str, events: int, per_second: int, output: Path | None) -> Timed:
        linger_s = _CLOCK_WINDOW_S if output is not None and "clocked_bid" in QUERIES[name] else 0
        text = " ".join(QUERIES[name].split())
        request = (events, self._options.events_per_split, per_second, linger_s, output or "", text)
        assert self._java.stdin is not None
        limit = threading.Timer(_TIMEOUT_S, self._java.kill)
        limit.start()
        try:
            self._java.stdin.write("\t".join(map(str, request)) + "\n")
            self._expect("RUNNING", name)
            start = time.monotonic()
            with CpuTime(lambda: [self.process]) as cpu:
                self._expect("FINISHED", name)
                return Timed(time.monotonic() - start, cpu.seconds)
        finally:
            limit.cancel()

    def _expect(self, answer: str, name: str) -> None:
        assert self._java.stdout is not None
        if (found := self._java.stdout.readline().strip()) != answer:
            self._log.flush()
            last = (self._directory / "log").read_text(errors="replace")[-2_000:]
            raise BenchmarkError(f"{name} in Flink: {found or 'the process has ended'}\n{last}")

    def _compile(self) -> None:
        services = self._directory / "classes" / "META-INF" / "services"
        services.mkdir(parents=True)
        (services / "org.apache.flink.table.factories.Factory").write_text("Nexmark$Factory\n")
        command = ["javac", "-nowarn", "-d", str(self._directory / "classes"), "-cp", self._classpath, str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchmarkError(f"{_SOURCE.name} does not compile with the classes of Flink:\n{done.stderr[-2_000:]}")
