"""``sbkit doctor --gpu``: tests what works on this machine's cards and how fast, and writes a report."""
