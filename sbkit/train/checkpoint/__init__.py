"""SpeechBrain's Checkpointer, safe against crashes, damaged files and full disks."""

from sbkit.train.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer"]
