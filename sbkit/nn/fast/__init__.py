"""Faster equivalents of SpeechBrain's layers: same parameters, same checkpoint keys, same outputs."""
