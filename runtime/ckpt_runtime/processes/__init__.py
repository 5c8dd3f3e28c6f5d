"""Processes: forks them, limits them, names them, proves that they have ended, and filters their environment.

* ``forking``: template processes that have imported everything and fork on request; a forked process may be bound to
  its template, and then ends with it
* ``limited_process``: untrusted code in a process with limits on memory, time and output; those of a driver are
  forked by a template, others are new interpreters
* ``handles``: handles of processes that are not children; ``process_mark``: stored marks that later prove that a
  process has ended
* ``user_environment``: the variables that user code may see
* ``held_directory``: temporary directories that have an owner even after a process was killed
* ``thread_dump``: the stacks of a process's threads, as bounded text

All other packages may import this one. It imports none of them, except ``client`` for reading start times.
"""
