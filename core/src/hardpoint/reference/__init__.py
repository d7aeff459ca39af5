"""Core as its own first plugin: reference attention, linear and experts kernels, all-to-alls and a communicator."""
