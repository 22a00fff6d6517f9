"""One file per ``sbkit`` command, named after it: ``add`` or ``HELP`` has its arguments, ``run`` its stages in order.

``run`` returns the exit code.
"""
