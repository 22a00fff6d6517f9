"""``sbkit doctor``: what this machine offers, and what keeps sbkit from running well, each with what to do."""
