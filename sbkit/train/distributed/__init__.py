"""Training on many devices: processes, the exchange of gradients, and the end of a run."""
