"""Recognisers on a stream, chunk by chunk, with the same results as on the whole utterance."""
