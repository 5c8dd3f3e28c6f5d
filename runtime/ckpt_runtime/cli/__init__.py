"""The command ``ckpt``.

* An expected failure is one line on standard error and an exit code; only a defect shows a traceback.
* Exit codes are never renumbered.
* With ``--json`` standard output holds one JSON document; ``ckpt events`` prints one in each line.
* Ctrl-C ends the waiting, not the job or the operation.
* The session file is refused when other users can read it. A process that has reused the session's process id is not
  taken for the session.
* The command never prints a token, and never starts Spark in its own process.
"""
