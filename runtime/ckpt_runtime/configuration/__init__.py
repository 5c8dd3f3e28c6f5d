"""Options, their values and how they may change. Reads no file and no environment; needs the standard library only.

* A configuration object is immutable; a change makes a new one.
* Two spellings of one value are equal (``10s``, ``10000ms``), and older keys mean the same option as the new ones.
* An unknown key in one of the system's namespaces is refused, and so is a cluster's option in a job.
* An error names the option, the value and what is allowed. A secret is never shown.
* An option that does not work is refused, never ignored.
"""
