"""Filter, project, ``mapInArrow``, watermark, aggregate, join and the host of stateful processors.

* An operator whose output is complete after ``finish()`` sets ``requires_final_checkpoint = False``; by default its
  subtask waits for the final checkpoint.
* UNION list state does not contain the items of finished subtasks: a restored watermark is the minimum of the remaining
  ones.
* All calls come from the subtask's thread. ``close`` is always called, ``finish`` only at the end of data.
* An aborted checkpoint rolls nothing back: a later checkpoint covers the prepared output.
* Batches emitted in ``prepare_snapshot`` precede the barrier; everything emitted later follows it.
* A join never emits a row whose event time, on either side, its emitted watermark has already reached.
* Each attempt works on its own copy of a processor.
* Rows of one key and trigger reach a processor in one call; ``together`` says where a batch may be cut.
* While rows wait for a trigger, watermarks and timers wait for them. One method ends each trigger in every time
  mode: watermark, due timers, results, and then the watermark for later operators.
* An error of user code names the method, the operator and the key.
* An operator never imports a state backend, never takes part in alignment and never knows its channels. A built-in
  operator never blocks; user code may, and its subtask has a thread of its own.
"""
