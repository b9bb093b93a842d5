"""What the lab stands on: devices, files, threads, Ctrl-C, and what is kept and recorded of this machine."""
