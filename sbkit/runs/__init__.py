"""Runs as output folders: their files, restoring a run, guarding its start, recording that it is complete."""
