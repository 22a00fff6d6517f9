"""One file per ``sbkit`` command, named after it: its arguments, and its stages in order."""
