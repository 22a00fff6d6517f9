"""A run as its output folder: what lies in it, reading it back, guarding a start, knowing that it is done."""
