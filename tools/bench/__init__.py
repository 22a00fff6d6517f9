"""Benchmarks: sbkit against a peer, or against itself, in turn on one machine; ``python -m tools.bench.train``."""
