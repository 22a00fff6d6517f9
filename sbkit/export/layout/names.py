"""Names in a bundle: of its files, its formats, its kinds, and of the inputs and outputs of its graphs."""

from __future__ import annotations

from pathlib import Path

from sbkit.data import publish
from sbkit.score.run_files import BUNDLE

#: The files of a bundle.
CONFIG = BUNDLE
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.model"
TOKENS = "tokens.txt"
RECIPE = "hyperparams.yaml"
PARITY = "parity.json"
README = "README.md"

#: The formats of a model.
ONNX = "onnx"
INT8 = "int8"
TORCH = "torch"
SPEECHBRAIN = "speechbrain"
SHERPA = "sherpa"
SHERPA_STREAM = "sherpa stream"
#: The formats of a traced graph.
TRACED = (ONNX, INT8, TORCH)
#: The file that each format is read from.
MODELS = {ONNX: "model.onnx", INT8: "model.int8.onnx", TORCH: "model.pt2", SPEECHBRAIN: RECIPE,
          SHERPA: "model.sherpa.onnx", SHERPA_STREAM: "stream.sherpa.onnx"}
#: The same for a streaming graph.
STREAMS = {ONNX: "stream.onnx", INT8: "stream.int8.onnx", TORCH: "stream.pt2"}
#: The same for a codec's graph from codes to audio.
DECODERS = {ONNX: "decoder.onnx", TORCH: "decoder.pt2"}
#: Names of a graph's inputs, [B, S] float32 and [B] int64, and of a recogniser's outputs, [B, T, V] float32, [B] int64.
INPUTS = ("signals", "lengths")
OUTPUTS = ("log_probs", "frames")
#: The outputs of a transducer, [B, T, J] float32, [B] int64; and the files of its prediction and its joint network.
STATES = ("states", "frames")
PREDICTION = "decoder.onnx"
JOINER = "joiner.onnx"
#: The same for a voice: ids of symbols [B, U] and their numbers [B], int64, speakers [B] int64, speeds [B] float32; and
#: samples from -1 to 1 [B, S] float32, their numbers [B] int64, and frames of each symbol [B, U].
VOICE_INPUTS = ("text", "lengths", "speaker", "speed")
VOICE_OUTPUTS = ("audio", "audio_lengths", "durations")
#: The outputs of a codec, codes [B, T, Q] and the numbers of their frames [B], int64. Its decoder maps them to signals
#: and lengths.
CODES = ("codes", "frames")

#: The mark of config.json.
FORMAT = "sbkit bundle"
VERSION = 1
#: What may be replaced as a bundle: the folder has this format's mark, and no file that isn't listed in it.
FOLDER = publish.FolderKind("a bundle", CONFIG, FORMAT, lambda values: values.get("files", ()))
#: Kinds of bundles, by how they are run.
CTC = "ctc"
TRANSDUCER = "transducer"
GRAPH = "graph"
LABELS = "labels"
VOICE = "voice"
CODEC = "codec"
ENHANCER = "enhancer"


def external_weights(path: Path) -> Path:
    """Return the file of the weights of a large ONNX model, which has them outside of its own file."""
    return path.with_name(f"{path.name}.data")


def size(folder: Path, *names: str) -> int:
    """Return the bytes of these files and of their external weights; missing ones count as 0."""
    paths = [path for name in names for path in (folder / name, external_weights(folder / name))]
    return sum(path.stat().st_size for path in paths if path.exists())
