"""What values in a bundle's config.json may be.

They determine the sizes of buffers, and who wrote a bundle may be a stranger: each has a bound.
"""

from __future__ import annotations

from sbkit.system.schema import Array, Enumerated, Object, Record, String, integer

#: Bytes of a configuration (10,000 symbols have 200 kB), and of tokens.txt.
MAX_BYTES = 1 << 24
#: The sample rate.
MAX_RATE = 768_000
#: Seconds of padding, context or a stream's window (Whisper's window, the longest known, has 30 s).
MAX_SECONDS = 60
#: Seconds of a frame.
MAX_FRAME_SECONDS = 1
#: Seconds of audio that a model takes at once.
MAX_CHUNK_SECONDS = 600
#: Values of a transducer's joint state, and the tokens that its prediction network sees.
MAX_JOINT = 1 << 16
MAX_CONTEXT = 16
#: Symbols of a text that a voice takes at once: an hour of speech.
MAX_TEXT = 50_000
#: Tokens; the largest vocabularies have 260,000.
MAX_TOKENS = 1_000_000
#: Numbers in the state of a stream.
MAX_STATE = 1 << 26
#: Replacement rules of a text, and characters of each: those of a language have up to 14 rules of two characters.
MAX_RULES = 1000
MAX_RULE_CHARACTERS = 100
#: The name of a file in the bundle's folder.
FILE = String(1, 255, r"(?!\.{1,2}$)[^/\\\x00-\x1f\x7f]+", "the name of a file in the bundle's folder")
#: Entries of each codebook.
BOOKS = Array(integer(maximum=1 << 24), max_items=256)
#: Types of the tensors of a stream's state.
_TYPES = ("float32", "int64")
#: Inputs of a streaming graph that hold their state.
STATE = Object(min_items=1, values=Record(
    {"type": Enumerated(_TYPES), "shape": Array(integer(maximum=MAX_STATE), max_items=8)}, needed=True))
#: Samples of a stream's padding or overlap.
SAMPLES = integer(0, MAX_SECONDS * MAX_RATE)
