"""Memory of a device: what fits into it, and what a user is told when something does not."""
