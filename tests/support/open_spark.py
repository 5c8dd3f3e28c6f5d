"""A Spark application as it is by default, whose ports require no secret: attacks are tried on it.

Prints one line of JSON with its ports, and messages for its RPC as Java serializes them. Its task appends a line to the
file named on the command line each time that it begins. Ends with its standard input.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from pyspark import SparkConf, SparkContext

ENDPOINT = "LocalSchedulerBackendEndpoint"


def main() -> None:
    begun = sys.argv[1]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        block_port = probe.getsockname()[1]
    settings = {
        "spark.ui.enabled": "false",
        "spark.authenticate": "false",
        "spark.driver.host": "localhost",
        "spark.driver.blockManager.port": str(block_port),
    }
    context = SparkContext(conf=SparkConf().setMaster("local[2]").setAll(list(settings.items())))
    threading.Thread(target=lambda: _run(context, begun), daemon=True).start()
    jvm: Any = context._jvm
    packages = jvm.org.apache.spark

    def serialized(message: Any) -> str:
        collected = jvm.java.io.ByteArrayOutputStream()
        stream = jvm.java.io.ObjectOutputStream(collected)
        stream.writeObject(message)
        stream.flush()
        return bytes(collected.toByteArray()).hex()

    verifier = getattr(packages.rpc.netty, "RpcEndpointVerifier$CheckExistence")
    kill = packages.scheduler.local.KillTask
    document = {
        "rpc_port": int(context.getConf().get("spark.driver.port") or 0),
        "block_port": block_port,
        "check": serialized(verifier(ENDPOINT)),
        "kills": [serialized(kill(task, True, "attacked")) for task in range(2)],
    }
    print(json.dumps(document), flush=True)
    sys.stdin.read()
    context.stop()


def _run(context: SparkContext, begun: str) -> None:
    def task(rows: Iterable[int]) -> Iterator[int]:
        with open(begun, "a") as file:
            file.write("begun\n")
        while True:
            time.sleep(0.05)
            yield from ()

    context.parallelize([0], 1).mapPartitions(task).collect()


if __name__ == "__main__":
    main()
