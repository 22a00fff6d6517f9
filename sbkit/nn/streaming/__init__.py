"""Recognisers that hear a stream piece by piece, with the same results as of the whole."""
