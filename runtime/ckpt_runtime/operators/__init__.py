"""Filter, project, ``mapInArrow``, watermark, aggregate, join and the host of stateful processors.

* An operator whose output is complete with ``finish()`` has ``requires_final_checkpoint = False``; the default is to
  wait.
* UNION list state leaves out what finished subtasks had: a watermark is the least of the remaining ones.
* All calls come from the subtask's thread. ``close`` is always called, ``finish`` only at the end of data.
* An aborted checkpoint rolls nothing back: a later one covers it.
* A batch emitted in ``prepare_snapshot`` lies before the barrier, everything later behind it.
* No row that a join emits is behind the watermark that it has emitted, by the event time of either side.
* Each attempt works on its own copy of a processor.
* Rows of one key and trigger reach a processor in one call; ``together`` says where a batch may be cut.
* While rows wait for a trigger, watermarks and timers wait behind them. One method ends each trigger in every time
  mode: watermark, due timers, results, and then the watermark for later operators.
* An error of user code names the method, the operator and the key.
* An operator never imports a state backend, never takes part in alignment and never knows its channels. A built-in
  operator never blocks; user code may, and its subtask has a thread of its own.
"""
