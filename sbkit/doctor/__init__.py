"""``sbkit doctor``: what this machine offers and what is in the way, one line each with what to do."""
