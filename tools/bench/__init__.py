"""Benchmarks: sbkit compared with a peer or itself, alternating on one machine; ``python -m tools.bench.train``."""
