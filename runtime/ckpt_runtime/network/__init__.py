"""Channels between subtasks: elements, framing, credit and gates without I/O, and the transport with data sockets.

* Each channel delivers every element exactly once and in order, including control elements.
* A sender sends no buffer without credit. Control elements need none.
* A blocked channel queues the elements that arrive; other channels continue. Frames of a released deployment are
  dropped.
* No byte of a connection is interpreted as a frame or message before the peer has proved that it knows the secret.
* The loss of a connection makes the subtasks at both ends fail.
* A control message is decoded and checked once, when it is received. A message of the wrong direction or shape is a
  failure of its sender, and the error names the message and the fault.
* Bodies are Arrow messages, or MessagePack and JSON of fixed types; nothing is unpickled.
* Sending never blocks a subtask's thread. Connections are encrypted only if ``security.ssl.internal`` is set.
"""
