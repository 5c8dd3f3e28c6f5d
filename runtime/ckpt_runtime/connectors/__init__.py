"""Sources and sinks: the built-in formats and PySpark data sources.

* A source restored at any parallelism emits every row after its stored position once, and none before it.
* Sources are built on the public protocol (``ckpt_runtime.sources``), and ``split_source`` alone runs it. PySpark
  readers, ``replay`` and ``numbers`` are older and stand on their own operators.
* A split that was found is in the state of one reader, with its position, until it has ended.
* Rows of one key stay in order in a partitioned replay.
* Sinks are built on the public protocol (``ckpt_runtime.sinks``), and ``sink_operators`` alone runs it.
* Each row of a sink of files lies in exactly one visible file, through any crash. A commit may be repeated.
* The id of a sink is in its state and outlives the job. Leftovers of earlier attempts and of ended jobs with the same
  sink are removed; files of jobs that may be alive and of other sinks are not touched.
* Offsets, partitions and commit messages are stored as JSON; their classes are looked up among those of the plan.
* A range of a PySpark reader is planned once, by the object that found it. Each of its partitions goes to one reader
  and lies in that reader's state until it is read.
* The end of a range leaves a range reader behind all rows of the range that come to this subtask, also after a
  restore. The enumerator's watermarks, which are sequence numbers, say how far ranges have been dealt out.
* A snapshot of a range reader is taken only where it can be restored exactly: the operator puts barriers off
  (``waiting_input``), and its subtask puts triggers off (``holds_checkpoints_back``).
* A ``taskAttemptId`` is used once: each worker counts from a random number of 62 bits.
* A sink never shows rows of a checkpoint that has not completed, and never aborts what was prepared when a checkpoint
  is aborted. A PySpark writer's ``abort`` is never called for what a snapshot covers, or may cover.
"""
