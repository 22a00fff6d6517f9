"""``make gpu``: tests what works on this machine's CUDA cards and how fast, and writes a report."""
