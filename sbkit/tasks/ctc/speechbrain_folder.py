"""Writes the files of a bundle that stock SpeechBrain reads: ``EncoderASR.from_hparams(source=BUNDLE)``.

SpeechBrain's ``Pretrainer`` looks for ``<name>.ckpt`` next to hyperparams.yaml and passes the module and the path to a
hook. The hook is ``safetensors.torch.load_model``, which takes the same arguments. So ``model.ckpt`` is a hard link to
model.safetensors: no second copy and no pickle. In the same way, ``tokenizer.ckpt`` is tokenizer.model, which
SpeechBrain's own hook for SentencePiece reads.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hyperpyyaml import load_hyperpyyaml
from safetensors.torch import save_model
from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
from speechbrain.processing.features import InputNormalization

from sbkit.data.tokens import Tokenizer
from sbkit.errors import SbkitError, summary
from sbkit.export import layout
from sbkit.export.features import is_input_normalization
from sbkit.export.padding import pad
from sbkit.recipe import load, writing
from sbkit.recipe.overrides import from_python
from sbkit.recipe.source import Node, Place
from sbkit.runs.initial.files import PARTS
from sbkit.system import disk
from sbkit.tasks.recognise.acoustic_model import GUARD_FRAMES, AcousticModel
from sbkit.tasks.recognise.keys import ENCODERS

_HEAD = """# For stock SpeechBrain; the weights are in model.ckpt, which is a safetensors file (never a pickle).
#
#   from speechbrain.inference.ASR import EncoderASR
#   asr = EncoderASR.from_hparams(source="{name}", savedir="/tmp/{name}")
#   print(asr.transcribe_file("clip.wav"))

sample_rate: {sample_rate}
"""

#: In place of a normalisation whose statistics are fixed.
_FIXED_NORM = """
# The global mean and deviation of training, fixed.
normalize: !new:speechbrain.nnet.normalization.BatchNorm1d
    input_size: {size}
    affine: false
    eps: 1.0e-20
"""

#: Before and after the convolutions.
_GUARD = """
# Silence after each utterance for the convolutions, as in training.
guard: !new:torch.nn.ConstantPad2d
    padding: [0, 0, 0, {frames}]
    value: 0.0
flatten: !new:torch.nn.Flatten
    start_dim: 2
crop: !new:torch.nn.ConstantPad2d
    padding: [0, 0, 0, -{outputs}]
    value: 0.0
"""

#: Around a Transformer, of which SpeechBrain has to call encode.
_WRAPPED = """
wrapped: !new:speechbrain.lobes.models.transformer.TransformerASR.EncoderWrapper
    transformer: !ref <{key}>
"""

#: Followed by the layers that have weights.
_MODEL = """
log_softmax: !new:speechbrain.nnet.activations.Softmax
    apply_log: true

model: !new:torch.nn.ModuleList
"""

#: Followed by all layers, in the order in which they are called.
_SEQUENCE = """
encoder: !new:speechbrain.nnet.containers.LengthsCapableSequential
"""

_TAIL = """
tokenizer: !new:sentencepiece.SentencePieceProcessor
audio_normalizer: !new:speechbrain.dataio.preprocess.AudioNormalizer
    sample_rate: !ref <sample_rate>

decoding_function: !name:speechbrain.decoders.ctc_greedy_decode
    blank_id: {blank}

modules:
    encoder: !ref <encoder>

pretrainer: !new:speechbrain.utils.parameter_transfer.Pretrainer
    loadables:
        model: !ref <model>
        tokenizer: !ref <tokenizer>
    custom_hooks:
        model: !name:safetensors.torch.load_model
"""


class Part(NamedTuple):
    """A module between waveforms and scores, with its definition in the recipe."""

    key: str
    module: Any  # for the attributes of its class
    node: Node

    @property
    def name(self) -> str:
        """Its key in hyperparams.yaml, where SpeechBrain calls the whole sequence ``encoder``."""
        return "layers" if self.key == "encoder" else self.key

    @property
    def is_wrapped(self) -> bool:
        """Whether it is called by its ``encode``, which a wrapper of SpeechBrain's does."""
        return hasattr(self.module, "encode")

    @property
    def fixed(self) -> bool:
        """Whether it is a normalisation with fixed statistics of the training set."""
        return is_input_normalization(self.module) and self.module.norm_type == "global"

    @property
    def learned(self) -> bool:
        """Whether it has weights or statistics to save."""
        return self.fixed or any(True for _ in self.module.parameters())


def write(folder: Path, run: Path, acoustic_model: AcousticModel, tokenizer: Tokenizer, sample_rate: int, blank_id: int,
          name: str) -> None:
    """Write hyperparams.yaml, the weights and the tokenizer into ``folder``."""
    recipe = load.tree(run / layout.RECIPE)
    # Comments refer to other keys of the recipe.
    nodes = recipe.mapped(lambda node: dataclasses.replace(node, comments={})).value
    encoder = next(key for key in ENCODERS if key in nodes and nodes[key].value is not None)
    modules = [("compute_features", acoustic_model.compute_features), ("normalize", acoustic_model.normalize),
               ("CNN", acoustic_model.frontend), (encoder, acoustic_model.encoder), ("ctc_lin", acoustic_model.head)]
    parts = [Part(key, module, _definition(module, nodes[key])) for key, module in modules if module is not None]
    text = _recipe(parts, acoustic_model, sample_rate, blank_id, name)
    (folder / layout.RECIPE).write_text(text, encoding="utf-8")
    try:
        built = load_hyperpyyaml(text)
    except Exception as error:
        raise SbkitError("speechbrain-mismatch", f"SpeechBrain can't build what the recipe describes: {summary(error)}",
                         hint="export without --target speechbrain") from error
    learned = [part for part in parts if part.learned]
    _load_weights(built["model"], learned)
    keys = {str(place): part.key for place, part in enumerate(learned)}
    save_model(built["model"], str(folder / layout.WEIGHTS), metadata={"format": "pt", PARTS: json.dumps(keys)})
    (folder / layout.TOKENIZER).write_bytes(tokenizer.processor.serialized_model_proto())
    disk.link_or_copy(folder / layout.WEIGHTS, folder / "model.ckpt")
    disk.link_or_copy(folder / layout.TOKENIZER, folder / "tokenizer.ckpt")


def _load_weights(modules: torch.nn.ModuleList, learned: Sequence[Part]) -> None:
    """Load what the parts have learnt into the modules that SpeechBrain has built of hyperparams.yaml."""
    for module, part in zip(modules, learned, strict=True):
        state = _fixed_state(part.module) if part.fixed else part.module.state_dict()
        own = module.state_dict()
        missing = sorted(set(own) - set(state))
        if missing:
            raise SbkitError("speechbrain-mismatch", f"{part.key}: the recipe describes weights that were not trained: "
                             f"{missing[0]} (and {len(missing) - 1} more)", key=part.key,
                             hint=f"has the run's {layout.RECIPE} been changed?")
        module.load_state_dict({key: state[key] for key in own})


def _fixed_state(norm: InputNormalization) -> dict[str, torch.Tensor]:
    """Return the state of the batch norm that normalises as the training set's statistics do."""
    deviation = norm.glob_std if norm.std_norm else torch.ones_like(norm.glob_std)
    return {"norm.running_mean": norm.glob_mean, "norm.running_var": deviation.clamp(min=norm.epsilon).square(),
            "norm.num_batches_tracked": torch.tensor(0)}


def _definition(module: Any, node: Node) -> Node:  # of any class
    """The node that a module was built from, without a decoder, which CTC needs none of."""
    if not isinstance(module, TransformerASR) or not isinstance(node.value, dict):
        return node
    return dataclasses.replace(node, value={**node.value, "num_decoder_layers": from_python(0, "num_decoder_layers")})


def _recipe(parts: list[Part], acoustic_model: AcousticModel, sample_rate: int, blank_id: int, name: str) -> str:
    """Return the text of hyperparams.yaml: the recipe's own definitions of its layers, in a sequence."""
    return "".join([
        _HEAD.format(name=name, sample_rate=sample_rate),
        _own_definitions(parts),
        *(_added_definitions(part, acoustic_model) for part in parts),
        _layers_with_weights(parts),
        _sequence(parts, acoustic_model),
        _TAIL.format(blank=blank_id),
    ])


def _own_definitions(parts: list[Part]) -> str:
    """Return the definitions of layers in the run's recipe, except those that are replaced."""
    own = Node({}, Place(), "")
    for part in parts:
        if not part.fixed:
            own.value[part.name] = part.node
    return writing.text(own)


def _added_definitions(part: Part, acoustic_model: AcousticModel) -> str:
    """Return the definitions that a layer needs, and the recipe lacks."""
    added = ""
    if part.fixed:
        added += _FIXED_NORM.format(size=len(part.module.glob_mean))
    if part.module is acoustic_model.frontend:
        added += _GUARD.format(frames=GUARD_FRAMES, outputs=GUARD_FRAMES // acoustic_model.subsampling)
    elif part.is_wrapped:
        added += _WRAPPED.format(key=part.name)
    return added


def _layers_with_weights(parts: list[Part]) -> str:
    """Return the definition of the list whose state is in model.ckpt."""
    names = [part.name for part in parts if part.learned]
    lines = [f"      - !ref <{name}>\n" for name in names]
    lines[0] = f"    - - !ref <{names[0]}>\n"  # the list is the only argument
    return _MODEL + "".join(lines)


def _sequence(parts: list[Part], acoustic_model: AcousticModel) -> str:
    """Return the definition of the sequence of all layers, which SpeechBrain calls."""
    names: list[str] = []
    for part in parts:
        if part.module is acoustic_model.frontend:
            names += ["guard", part.name, "flatten", "crop"]
        elif part.is_wrapped:
            names.append("wrapped")
        else:
            names.append(part.name)
    names.append("log_softmax")
    return _SEQUENCE + "".join(f"    {name}: !ref <{name}>\n" for name in names)


class EncoderASRRunner:
    """Runs SpeechBrain's ``EncoderASR``, one utterance at a time, since it takes no sample counts.

    min_samples : shorter clips are padded to this length
    """

    def __init__(self, bundle: Path, min_samples: int = 1):
        from speechbrain.inference.ASR import EncoderASR

        for name in ("fetching", "parameter_transfer"):
            logging.getLogger(f"speechbrain.utils.{name}").setLevel(logging.WARNING)
        with tempfile.TemporaryDirectory() as folder:
            self._model = EncoderASR.from_hparams(source=str(bundle), savedir=folder, run_opts={"device": "cpu"})
        self._min_samples = min_samples

    def __call__(self, signals: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Compute the log-probabilities [T, V] of each waveform [S]."""
        return [self._model.encode_batch(self._batch(signal), torch.ones(1))[0].numpy() for signal in signals]

    def transcribe(self, signal: np.ndarray) -> str:
        """Return what SpeechBrain's own decoding writes, for which no pause ends a word."""
        (text,), _ = self._model.transcribe_batch(self._batch(signal), torch.ones(1))
        return str(text)

    def _batch(self, signal: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(pad([signal], self._min_samples)[0])
