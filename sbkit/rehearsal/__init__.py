"""Runs a recipe from start to end on cards that compute nothing, on a machine without a GPU."""
