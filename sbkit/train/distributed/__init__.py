"""One training on many devices: its processes, the wrap around the model, how it ends."""
