"""Sources and sinks: the built-in formats and PySpark data sources.

* A source that is restored, at any parallelism, emits every row after its stored position once, and none before it.
* Sources are built on the public protocol (``ckpt_runtime.sources``), and ``split_source`` alone runs it. PySpark
  readers, ``replay`` and ``numbers`` have operators of their own.
* A discovered split is in the state of exactly one reader, with its position, until it has been read to its end.
* Rows of one key stay in order in a partitioned replay.
* Sinks are built on the public protocol (``ckpt_runtime.sinks``), and ``sink_operators`` alone runs it.
* A file sink writes each row to exactly one visible file, through any crashes. A commit may be repeated.
* The id of a sink is in its state and outlives the job. Leftovers of earlier attempts and of ended jobs with the same
  sink are removed; files of other sinks, and of jobs that may still be running, are not touched.
* Offsets, partitions and commit messages are stored as JSON; their classes are looked up among those of the plan.
* A range of a PySpark reader is planned once, by the object that found it. Each of its partitions is assigned to one
  reader and is in that reader's state until it is read.
* A range reader emits the end of a range after all rows of the range that this subtask reads, also after a restore. The
  enumerator's watermarks are sequence numbers up to which ranges have been sent.
* A snapshot of a range reader is taken only where it can be restored exactly: the operator postpones barriers
  (``waiting_input``), and its subtask postpones triggers (``holds_checkpoints_back``).
* A ``taskAttemptId`` is used once: each worker counts from a random number of 62 bits.
* A sink never makes rows visible before their checkpoint has completed, and does not abort prepared output when a
  checkpoint is aborted. A PySpark writer's ``abort`` is never called for output that a snapshot covers, or may cover.
"""
