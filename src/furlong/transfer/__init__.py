"""How weights travel between processes: checksums on the device, shared memory, process groups."""
