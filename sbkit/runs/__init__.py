"""Runs as output folders: what they hold, reading one back, guarding a start, knowing when it is complete."""
