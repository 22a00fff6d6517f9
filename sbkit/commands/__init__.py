"""One file per command of ``sbkit``, called as it is: its words, and its stages in order."""
