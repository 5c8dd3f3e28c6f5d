"""The shells in the driver: dispatcher, job masters, slots, the control endpoint. They own threads, the clock and RPC.

An acknowledgement on its way in, and a trigger on its way out::

    worker --socket--> ControlEndpoint --> SlotPool --> JobShell --> JobCore
    worker <--socket-- Peer <-- TaskGateway <-- JobShell <-- JobCore

What takes time leaves the shell through its host and comes back as an event::

    JobCore -- WriteMetadata --> StorageEffects --> host.in_pool --> a thread writes
    JobCore <-- MetadataWritten -- JobShell <-- on the loop <-- written, failed, unknown, or another driver leads

An event that occurs while outputs are being carried out waits in the shell's inbox until all of them are. The
simulation of whole jobs runs the shell, the storage effects and the task gateway on a host whose time and order come
from a seed.

* A job's options lie in its stored plan and its graph, and take precedence over the cluster's; a removed option is in
  none.
* A snapshot that does not fit is refused before anything starts. The preflight makes the same checks.
* A claim exists before its job is stored, and its places are stored with the job. It is released after the last
  deletion. Of a claimed place a job deletes only what its claim names and no complete checkpoint of another job
  needs.
* A trigger id or job id given by the client starts one thing once.
* A request for slots is served as a whole or not at all. While it waits it holds only what its job had before.
* A driver that was suspended reads what its peers have sent before it declares one of them silent.
* Slots outlive deployments. A released slot gets a fresh worker before another job uses it. A lost slot costs no
  other slot.
* A worker or agent that breaks the protocol, or speaks for a subtask that it was not given, is lost at once, with the
  message and its fault as the cause.
* An error of storage is either a certain failure or an unknown outcome. An unknown outcome is settled by reading
  again; a second failed attempt does not settle the first one. A call that has passed its deadline has an unknown
  outcome.
* The fence is checked before and after each durable write. Losing leadership is never a failed checkpoint, whose
  files would be deleted: the driver gives the job up and touches nothing.
* Persist, then apply, then answer: submissions, overrides and the end of a job. A change that races with the end is
  answered with the end.
* A checkpoint that cannot be read is never replaced by an older one; its job is left alone and named.
* User code never runs here, and nothing of an uploaded archive is imported here.
"""
