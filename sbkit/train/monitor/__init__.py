"""What a run shows and logs while it trains."""
