"""Training on many devices: processes, the wrapper around the model, and the end of a run."""
