"""The shells in the driver: dispatcher, job masters, slots, the control endpoint. They own threads, the clock and RPC.

An acknowledgement on its way in, and a trigger on its way out::

    worker --socket--> ControlEndpoint --> SlotPool --> JobShell --> JobCore
    worker <--socket-- Peer <-- TaskGateway <-- JobShell <-- JobCore

Slow work is started by the shell through its host, whose answer is an event::

    JobCore -- WriteMetadata --> StorageEffects --> host.in_pool --> a thread writes
    JobCore <-- MetadataWritten -- JobShell <-- on the loop <-- written, failed, unknown, or another driver leads

An event that occurs while outputs are being carried out waits in the shell's inbox until all of them are. The
simulation of whole jobs runs the shell, the storage effects and the task gateway on a host whose time and order come
from a seed.

* A job's options are kept in its stored plan and in its graph, and take precedence over the cluster's. Removing an
  option removes it from both.
* A snapshot that does not fit is refused before anything starts. The preflight makes the same checks.
* A claim is written before its job is stored, and the claimed directories are stored with the job. The claim is
  released after the job's last deletion. In a claimed directory, a job deletes only files that its claim names and
  that no complete checkpoint of another job needs.
* A request that carries a trigger id or job id chosen by the client is idempotent: repeating it starts nothing more.
* A request for slots is served as a whole or not at all. While it waits it holds only what its job had before.
* A driver that was suspended reads what its peers have sent before it declares one of them silent.
* Slots outlive deployments. A released slot gets a fresh worker before another job uses it. A lost slot costs no
  other slot.
* A worker or agent that breaks the protocol, or reports about a subtask that it was not given, is declared lost at
  once. The cause of the loss names the message and what is wrong with it.
* An error of storage is either a certain failure or an unknown outcome. An unknown outcome is settled by reading
  again; a second failed attempt does not settle the first one. A call that has passed its deadline has an unknown
  outcome.
* The fence is checked before and after each durable write. Losing leadership is never a failed checkpoint, whose
  files would be deleted: the driver stops running the job and changes nothing in storage.
* Submissions, overrides and the end of a job are first persisted, then applied, then answered. If a change races with
  the end of its job, the answer says that the job has ended.
* A checkpoint that cannot be read is never replaced by an older one: its job is not started, and is listed with the
  reason.
* User code never runs here, and nothing of an uploaded archive is imported here.
"""
