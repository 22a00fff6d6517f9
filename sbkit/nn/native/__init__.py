"""Kernels in C for training on a CPU, compiled by the machine's own compiler when they are first needed."""
