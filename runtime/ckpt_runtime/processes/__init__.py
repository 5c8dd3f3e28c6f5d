"""Processes: how they are forked, limited, named, proven gone, and what they may see. Stands below every other room.

* ``forking``: template processes that have imported everything and fork on request; a forked process ends with its
  template where it is bound to it
* ``limited_process``: untrusted code in a process with limits on memory, time and output; a driver's are forked by a
  ``limited_template``, others are new interpreters
* ``handles``: handles of processes that are not children; ``process_mark``: what proves later that a process is gone
* ``user_environment``: the variables that user code may see
* ``held_directory``: temporary directories that have an owner even after a process was killed
* ``thread_dump``: what the threads of a process do, as bounded text

Nothing here imports another room, except for the reading of start times in ``client``.
"""
