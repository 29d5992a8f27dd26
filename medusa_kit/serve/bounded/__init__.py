"""Child processes with limits of the kernel, in which schemas are tried."""
