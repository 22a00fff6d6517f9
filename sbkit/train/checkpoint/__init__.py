"""SpeechBrain's Checkpointer, made safe: saving, finding, recovering and deleting, each in its file."""

from sbkit.train.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer"]
