"""Memory of a device: what fits into it, and the message when something does not."""
