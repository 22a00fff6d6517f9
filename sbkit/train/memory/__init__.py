"""Memory of device and host: what fits into it, and what a user is told when something does not."""
