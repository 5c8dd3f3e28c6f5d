"""What a pipeline author imports: ``StreamSession``, ``Stream`` and the aggregate functions."""

# Names are PySpark's.
# ruff: noqa: A004

from ckpt_runtime.api.functions import avg, count, max, min, sum
from ckpt_runtime.api.session import StreamSession
from ckpt_runtime.api.stream import Stream
from ckpt_runtime.graph.errors import PlanError

__all__ = ["PlanError", "Stream", "StreamSession", "avg", "count", "max", "min", "sum"]
