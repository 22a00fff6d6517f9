"""Base utilities for all packages: disks, processes, cores, caches and the terminal."""
