"""One command that shows what works on this machine's cards, and how fast: checks in processes of their own, a page."""
