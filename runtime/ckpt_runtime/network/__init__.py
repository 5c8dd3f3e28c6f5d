"""Channels between subtasks: elements, framing, credit and gates without I/O, and the transport with data sockets."""
