"""Runs a recipe from start to end on simulated GPUs (null cards), on a machine without a GPU."""
