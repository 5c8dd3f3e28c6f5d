"""Channels between subtasks: elements, framing, credit and gates without I/O, and the transport with data sockets.

* Each channel delivers everything once and in order, control elements included.
* A sender sends no buffer without credit. Control elements need none.
* A blocked channel keeps what arrives; the others continue. Frames of a released deployment are dropped.
* Nothing of a connection is read as a frame or message before the peer has proved the secret.
* A lost connection fails both ends.
* A control message is decoded and checked once, when it is received. A message of the wrong direction or shape is a
  failure of its sender, and the error names the message and what is wrong.
* Bodies are Arrow messages, or MessagePack and JSON of fixed types; nothing is unpickled.
* It never blocks a subtask's thread, and encrypts only if ``security.ssl.internal`` says so.
"""
