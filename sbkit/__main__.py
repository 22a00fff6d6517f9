"""``python -m sbkit``, and ``torchrun -m sbkit`` for commands that use several devices."""

import sys

from sbkit.cli import main

sys.exit(main())
