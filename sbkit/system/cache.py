"""The user's cache folder, shared by all their runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$SBKIT_CACHE``, or ``sbkit`` in the user's cache folder."""
    home = os.environ.get("SBKIT_CACHE")
    return Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sbkit"
