"""Work done before a worker registers: imports heavy modules and loads the compiled kernels.

A warm spare has already done this when it takes over from a dead worker.
"""

from __future__ import annotations

import importlib

from ckpt_runtime.state import registry

_HEAVY_MODULES = (
    "pyarrow.compute",
    "pyarrow.dataset",
    "pyarrow.acero",
    "pyarrow.parquet",
    "pyspark.sql.datasource",
    "pyspark.sql.types",
    "pyspark.sql.streaming.stateful_processor",
    "ckpt_runtime.frontend.program",
    "ckpt_runtime.task.operator_factory",
)


def warm_up() -> None:
    """Imports and compiles; takes seconds the first time on a machine and a fraction of one later."""
    for module in _HEAVY_MODULES:
        importlib.import_module(module)
    registry.warm_up()
    importlib.import_module("ckpt_runtime.state.kernels").warm_up()
