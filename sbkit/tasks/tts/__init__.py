"""The task of a voice: text to speech, through the codes of a codec."""

from typing import TYPE_CHECKING

from sbkit.system.lazy import on_first_use
from sbkit.tasks.tts.keys import TTSKeys as Keys

if TYPE_CHECKING:
    from sbkit.tasks.tts.task import TTS

__all__ = ["TTS", "Keys"]

__getattr__ = on_first_use("sbkit.tasks.tts.task", "TTS")
