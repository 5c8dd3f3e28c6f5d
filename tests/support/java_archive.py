"""An archive of Spark's classes: with it, a Java machine of the tests starts with half of the work.

``python -m tests.support.java_archive`` makes it in the virtual environment, unless it is there. A Java machine whose
version or class path does not fit ignores the archive.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tests.support.patience import patient


def _archive() -> Path:
    """It fits the files of one installation of PySpark only."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    installed = (Path(spec.origin).parent / "jars").stat().st_mtime_ns
    return Path(sys.prefix) / f"spark-{installed}.jsa"


ARCHIVE = _archive()
SHORT_LIVED = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=160m -XX:MetaspaceSize=256m "
    "-XX:+UseSerialGC -Djdk.lang.Process.launchMechanism=VFORK"
)
"""Java machines of tests live for a minute or two: compiling for the long run would be half of their work.

A machine that compiles for the short run would have space for 48 MB of compiled code, would drop half of it whenever
that is full, and compile it again. It would also collect garbage each time the classes outgrow a first small limit.
Hadoop starts ``chmod`` for each file that it makes; by default Java starts a helper first, for each of these.
"""
_QUIET = "-Xlog:disable -Xlog:all=error:stderr"
"""The warning about an archive that does not fit would go to the standard output, which programs read."""


def java_options() -> str:
    """For ``JDK_JAVA_OPTIONS``."""
    return f"{SHORT_LIVED} {_QUIET} -XX:SharedArchiveFile={ARCHIVE}" if ARCHIVE.exists() else SHORT_LIVED


def end_spark() -> None:
    """Stops the Spark of this process, if there is one, and the Java machine that PySpark would keep until it ends."""
    from pyspark import SparkContext

    if SparkContext._active_spark_context is not None:
        SparkContext._active_spark_context.stop()
    gateway = SparkContext._gateway
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(patient(30))
        SparkContext._gateway = SparkContext._jvm = None


def main() -> None:
    """Runs a small program in Spark, whose Java machine writes the classes that it has loaded."""
    if ARCHIVE.exists():
        return
    with tempfile.TemporaryDirectory(dir=sys.prefix) as directory:
        made = Path(directory) / ARCHIVE.name
        environment = {
            **os.environ,
            "JDK_JAVA_OPTIONS": f"{SHORT_LIVED} {_QUIET} -XX:ArchiveClassesAtExit={made}",
            "SPARK_LOCAL_IP": "127.0.0.1",
            "PYSPARK_PYTHON": sys.executable,
        }
        subprocess.run([sys.executable, "-c", _PROGRAM, directory], check=True, env=environment)
        for earlier in Path(sys.prefix).glob("spark-*.jsa"):
            earlier.unlink()
        os.replace(made, ARCHIVE)


_PROGRAM = """
import sys
from pyspark.sql import SparkSession
from tests.support.java_archive import end_spark

settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.driver.host": "127.0.0.1"}
# As in the tests that compare with Spark. Otherwise this takes three times as long.
settings |= {"spark.sql.shuffle.partitions": "1"}
settings |= {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
spark = SparkSession.builder.master("local[1]").config(map=settings).getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
rows, totals = sys.argv[1] + "/rows", sys.argv[1] + "/totals"
spark.range(100).selectExpr("id", "timestamp_seconds(id) AS t").write.parquet(rows)
stream = spark.readStream.schema("id LONG, t TIMESTAMP").parquet(rows).withWatermark("t", "1 second")
counts = stream.groupBy("t").count().writeStream.format("parquet").option("checkpointLocation", totals + "-checkpoint")
counts.trigger(availableNow=True).start(totals).awaitTermination()
spark.read.parquet(totals).collect()
spark.range(10).rdd.map(lambda row: row.id).collect()
end_spark()
"""

if __name__ == "__main__":
    main()
