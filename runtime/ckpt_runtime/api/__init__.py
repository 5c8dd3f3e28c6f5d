"""What a pipeline author imports: ``StreamSession``, ``Stream`` and the aggregate functions.

Pipelines are described in PySpark's words and collected into a logical plan. ``entry_point`` also runs PySpark
programs.

* A mistake raises an error at the author's own line; the message lists the names that exist.
* Equal archives, arguments and options give an equal job graph. Modules of an earlier archive are unloaded before the
  next one is loaded, so that two archives never mix.
* User code never runs in the driver. It runs in a planning process with limits, which a template without user code
  forks. Its answer is checked against a schema, because user code could have written it; its output is discarded.
* A plan never opens a source or a sink, but it may read a schema. An entry point is never a path.
"""

# Names are PySpark's.
# ruff: noqa: A004

from ckpt_runtime.api.functions import avg, count, max, min, sum
from ckpt_runtime.api.session import StreamSession
from ckpt_runtime.api.stream import Stream
from ckpt_runtime.graph.errors import PlanError

__all__ = ["PlanError", "Stream", "StreamSession", "avg", "count", "max", "min", "sum"]
