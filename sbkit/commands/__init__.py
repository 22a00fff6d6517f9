"""One file per ``sbkit`` command, named after it; ``sbkit.cli.GROUPS`` says where the help lists it.

Its docstring begins with what the help says about it. ``run`` has its stages in order and returns the exit code. It
gets the arguments that ``add`` declares; without ``add``, a recipe and its overrides, where ``HELP`` says more to its
users and ``OPTIONS`` names its own options.
"""
