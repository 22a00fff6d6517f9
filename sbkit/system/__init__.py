"""The ground: disks, processes, cores, caches and the terminal, as every room needs them."""
