"""Runs a recipe from start to end on fake GPUs, on a machine without a GPU."""
