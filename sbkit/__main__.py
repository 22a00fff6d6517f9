"""``python -m sbkit``, and ``torchrun -m sbkit`` for commands on many devices."""

import sys

from sbkit.cli import main

sys.exit(main())
