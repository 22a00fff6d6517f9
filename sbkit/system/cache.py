"""Where sbkit keeps for a user what any of their runs may use again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$SBKIT_CACHE``, or ``sbkit`` in the user's folder for such things."""
    home = os.environ.get("SBKIT_CACHE")
    return Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sbkit"
