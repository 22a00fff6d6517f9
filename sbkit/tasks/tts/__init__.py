"""The task of a voice: text to speech, through the codes of a codec."""

from sbkit.tasks.tts.task import TTS

__all__ = ["TTS"]
