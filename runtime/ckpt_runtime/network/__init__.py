"""Channels between subtasks: elements, framing, credit and gates without I/O, and the one transport with data sockets."""
