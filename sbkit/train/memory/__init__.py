"""Memory of device and host: what fits into it, and how a run continues when something does not."""
