"""``sbkit doctor``: what this machine offers and what stands in the way, a line each with what to do."""
