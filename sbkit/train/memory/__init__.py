"""Memory of a device and its host: what fits, and going on where something did not."""
