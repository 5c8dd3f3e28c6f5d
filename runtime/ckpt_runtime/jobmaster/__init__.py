"""The shells in the driver: dispatcher, job masters, slots, the control endpoint. They own threads, clock and RPC."""
