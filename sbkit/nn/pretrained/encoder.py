"""A pretrained encoder for recipes, a head for it, and a pretrainer that loads its weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from speechbrain.utils.distributed import if_main_process
from torch import Tensor, nn
from torch.nn import functional

from sbkit.errors import SbkitError, first_line, shown
from sbkit.nn.lengths import N, lengths_to_mask
from sbkit.nn.pretrained import source, tensors
from sbkit.nn.pretrained.conformers import Lasr, Parakeet
from sbkit.nn.pretrained.layers import replace_layers
from sbkit.nn.pretrained.networks import EncoderOptions, Network, W2vBert, Wav2Vec2, check_size, make_config
from sbkit.nn.pretrained.source import Settings, check_language, is_folder, names_model, weights
from sbkit.nn.pretrained.whisper import Whisper

logger = logging.getLogger(__name__)


class Encoder(nn.Module):
    """Waveforms [B, S] and sample counts [B] to states [B, T, D], which do not depend on the rest of the batch and are
    zero for padding.

    It is built from the source's config with random weights; :class:`Weights`, or ``load``, loads the pretrained ones.
    A run saves a copy of the config, so that its checkpoints can be used without the source.

    source : a folder written by transformers' ``save_pretrained``, or a repository of the Hugging Face Hub,
        ``owner/name`` or ``owner/name@revision``, which is downloaded once; None: that of ``init_from``
    folder : where a run saves its copy of the config
    init_from : the source of the weights; if it is a run, its copy of the config is used if the source is missing
    freeze_front : never train the convolutional front end
    layers : use only this many of the lowest layers; None: all
    dropout : for all of the encoder's dropouts; None: as in its config
    mask_time_prob, mask_time_length : share of the frames to mask in training, and length of the masked spans; None: as
        in its config
    mask_feature_prob, mask_feature_length : the same for features
    whole_window : pad Whisper's input to 30 seconds with silence, as in its pretraining
    adapter_language : the language whose adapters to load, for MMS, by its code there, such as ``fra``; None: those in
        the model's own file
    add_adapter : keep the subsampling layers that some models have between transformer and head; needed by a run that
        starts from such a model with its head
    """

    sample_rate = 16_000
    """The sample rate of pretraining, for all these families."""
    longest_seconds: float | None = None
    """The longest utterance that it takes; None: any."""
    has_facts_without_weights: ClassVar[bool] = True
    """While a corpus is prepared, it is built on the ``meta`` device (see ``sbkit.recipe.on_demand``)."""

    def __init__(self, source: str | None, folder: str | Path | None = None, *, init_from: str | Path | None = None,
                 freeze_front: bool = True, layers: int | None = None, dropout: float | None = None,
                 mask_time_prob: float | None = None, mask_time_length: int | None = None,
                 mask_feature_prob: float | None = None, mask_feature_length: int | None = None,
                 whole_window: bool = False, adapter_language: str | None = None, add_adapter: bool = False):
        super().__init__()
        if adapter_language is not None:
            check_language(adapter_language)
        is_local = isinstance(source, str) and is_folder(source)
        copy = self._copied_settings(source, folder, init_from, is_local)
        self.settings = Settings.of(_model_named(source, init_from)) if copy is None else copy
        self.folder = folder
        if adapter_language is not None:
            self.settings = replace(self.settings, adapter_language=adapter_language)
        self.options = EncoderOptions(freeze_front, layers, dropout, mask_time_prob, mask_time_length,
                                      mask_feature_prob, mask_feature_length, whole_window, add_adapter)
        has_adapter = bool(self.settings.config.get("add_adapter"))
        takes_head = bool(init_from) and names_model(str(init_from))
        if has_adapter != add_adapter and (add_adapter or takes_head):
            raise SbkitError("bad-value", f"{self.source} has {'' if has_adapter else 'no '}layers between encoder and "
                             f"head, but add_adapter is {str(add_adapter).lower()}", key="add_adapter",
                             value=add_adapter, hint=f"--encoder.add_adapter {str(has_adapter).lower()}")
        shapes = None
        if copy is None and (is_local or (source is None and takes_head)):
            shapes = tensors.TensorFiles(weights(self.source), network_class(self.settings).prefixes).shapes
        self.network = build_network(self.settings, self.options, shapes)
        self.width = self.network.width
        self.longest_seconds = self.network.longest_seconds
        self.normalizes_loudness = self.network.normalizes
        self.adapter_language = adapter_language
        if adapter_language is not None and not self._adapters():
            raise SbkitError("no-language-adapter", f"adapter_language is {adapter_language}, but {self.source} has no "
                             "language adapters", key="adapter_language", value=adapter_language,
                             hint="it is for models of MMS, whose config.json has adapter_attn_dim; write null")
        self.reinitialised: frozenset[str] = frozenset()
        """The names of tensors that the source lacks, once it was checked."""
        if copy is None and is_local:  # so problems are reported at once
            self.check_source()

    @staticmethod
    def _copied_settings(source: str | None, folder: str | Path | None, init_from: str | Path | None,
                         is_local: bool) -> Settings | None:
        """Return the settings that this run, or the run that it starts from, has a copy of; None if there is none."""
        copy = Settings.kept(source, folder)
        if source is None and init_from is not None and not any(Path(folder or "").glob("CKPT+*")):
            copy = None  # an earlier start without a checkpoint may have had another init_from
        if copy is None and not is_local:
            copy = Settings.of_run(source, init_from)
        return copy

    def extra_repr(self) -> str:
        """Format the options that its layers don't show, and that affect the memory of a step."""
        options = self.options
        return f"freeze_front={options.freeze_front}, dropout={options.dropout}, whole_window={options.whole_window}"

    @property
    def source(self) -> str:
        """Where its weights come from, a folder or a repository."""
        return self.settings.source

    @property
    def dispensable(self) -> frozenset[str]:
        """The names of tensors that only training uses, and that start at random if the source lacks them."""
        return frozenset(f"network.{name}" for name in self.network.reinitialised)

    @property
    def stack(self) -> nn.ModuleList:
        """The layers of the transformer, lowest first, without the convolutional front end."""
        return self.network.stack

    def frames(self, samples: N) -> N:
        """Return the number of states for a number of samples."""
        return self.network.frames(samples)

    def forward(self, signals: Tensor, samples: Tensor) -> Tensor:
        """[B, S], [B] -> [B, T, D]."""
        inside = lengths_to_mask(samples, signals.shape[1])
        states = self.network(signals.masked_fill(~inside, 0.0), samples)
        return states.masked_fill(~lengths_to_mask(self.frames(samples), states.shape[1])[..., None], 0.0)

    def check_source(self) -> tuple[tensors.TensorFiles, list[str]]:
        """Return the source's tensors, after checking that they fit, and lines to log about them."""
        paths = weights(self.source)
        if self.adapter_language is not None:
            path = source.adapter(self.source, self.adapter_language)
            missing = self._adapters() - tensors.TensorFiles([path], self.network.prefixes).shapes.keys()
            if missing:
                raise SbkitError("pretrained-mismatch", f"{path} lacks {len(missing)} tensors of the adapters, such as "
                                 f"{min(missing)}", file=path,
                                 hint="is it of this model? if the download is incomplete, download it again")
            paths.append(path)
        files = tensors.TensorFiles(paths, self.network.prefixes)
        lines = tensors.check(self.network, files, self.source)
        lines += self.notes()
        if any(name.startswith(source.HEADS) for name in files.shapes):
            lines.append(f"--init_from {self.source} loads its CTC head and its tokens too")
        absent = self.network.state_dict().keys() - files.shapes.keys()
        self.reinitialised = frozenset(f"network.{name}" for name in absent)
        return files, lines

    def notes(self, trains: bool = True) -> list[str]:
        """Return lines to log about options that differ from the source's config, or that were chosen."""
        lines = []
        layerdrop = self.settings.config.get("layerdrop")
        if trains and layerdrop:
            lines.append(f"layerdrop is 0 instead of the config's {shown(layerdrop)}: no layer is skipped")
        if self._adapters():
            language = self.adapter_language
            lines.append(f"adapters of {language}" if language else "the model's own adapters, of no language")
        return lines

    def _adapters(self) -> set[str]:
        """Return the names of the tensors of MMS's adapters."""
        return {name for name in self.network.state_dict() if ".adapter_layer." in name}

    def load(self) -> None:
        """Load the source's weights."""
        files, lines = self.check_source()
        tensors.fill(self.network, files)
        if if_main_process():
            logger.info("%s: %s", self.source, "; ".join(lines))

    def keep(self) -> None:
        """Write a copy of the config into the run."""
        if self.folder is not None:
            self.settings.keep(self.folder)

    def compare(self) -> None:
        """Raise if the source is missing, or its config has changed since this encoder was built."""
        if Settings.of(self.source) != self.settings:
            raise SbkitError("changed-source", f"the config of {self.source} has changed since this run began",
                             value=self.source, hint="name another output_folder, or restore the old config")


class Head(nn.Linear):
    """Encoder states [B, T, D], zero for padding, to scores [B, T, V].

    encoder : the encoder, for its width
    n_neurons : number of scores V
    dropout : dropout before the linear layer
    kernel_size : of a convolution before the linear layer, an odd number; 0: no convolution
    width : outputs of the convolution
    """

    def __init__(self, encoder: Encoder, n_neurons: int, dropout: float = 0.0, kernel_size: int = 0, width: int = 512):
        if kernel_size < 0 or (kernel_size and not kernel_size % 2):
            raise SbkitError("bad-value", f"kernel_size of the head is {kernel_size}", key="kernel_size",
                             value=kernel_size, hint="write an odd number, such as 5, or 0 for no convolution")
        super().__init__(width if kernel_size else encoder.width, n_neurons)
        self.dropout = dropout
        # The norm has no bias, so that the padding of the convolution's input stays zero.
        self.norm = nn.RMSNorm(encoder.width) if kernel_size else None
        self.conv = nn.Conv1d(encoder.width, width, kernel_size, padding=kernel_size // 2) if kernel_size else None

    def forward(self, states: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, V]."""
        if self.norm is not None and self.conv is not None:
            states = functional.gelu(self.conv(self.norm(states).transpose(1, 2))).transpose(1, 2)
        return super().forward(functional.dropout(states, self.dropout, self.training))


class Weights:
    """A recipe's ``pretrainer`` for an encoder: one rank downloads the weights, all load them before training.

    >>> Weights(encoder)  # doctest: +SKIP
    """

    collect_in = None

    def __init__(self, encoder: Encoder):
        self.loadables = {"encoder": encoder}
        self.paths = {"encoder": Path(encoder.source)}
        self.custom_hooks = {"encoder": lambda encoder, path: encoder.load()}

    def is_loadable(self, name: str) -> bool:
        """Whether there is something to load under this name."""
        return name in self.loadables

    def collect_files(self) -> dict[str, Any]:
        """Download all files, and keep the encoder's config in the run."""
        encoder = self.loadables["encoder"]
        encoder.compare()
        encoder.keep()
        encoder.check_source()  # so that problems are reported before a corpus is prepared
        return {"encoder": encoder.source}


def _model_named(source: str | None, init_from: str | Path | None) -> str:
    """Return the pretrained model that ``source``, or otherwise ``init_from``, names; raises if neither does."""
    if isinstance(source, str) and source:
        return source
    if init_from is not None and names_model(str(init_from)):
        return str(init_from)
    problem = "source names no pretrained encoder"
    if init_from is not None:
        problem += f", and {init_from} is no run with a copy of an encoder's config"
    raise SbkitError("missing-key", problem, key="encoder_source",
                     hint="give its folder, or its name on the Hugging Face Hub: --encoder_source owner/name")


def network_class(settings: Settings) -> type[Network]:
    """Return the class of a family's networks."""
    classes: dict[str, type[Network]] = {"wav2vec2-bert": W2vBert, "whisper": Whisper, "parakeet_encoder": Parakeet,
                                         "lasr_encoder": Lasr}
    return classes.get(str(settings.config.get("model_type")), Wav2Vec2)


def build_network(settings: Settings, options: EncoderOptions,
                  shapes: Mapping[str, tuple[int, ...]] | None = None) -> Network:
    """Build the encoder that the settings describe, with random weights.

    shapes : of the weights that it will get, if they are here, which the settings must fit
    """
    kind, config = network_class(settings), make_config(settings, options)
    try:
        check_size(kind, config, settings.source, shapes)
        network = kind(settings, options, config)
    except SbkitError:
        raise
    except Exception as error:  # transformers checks some values of a config only when it builds the layers
        raise SbkitError("damaged-pretrained", f"{settings.source}: its config.json describes no encoder: "
                         f"{first_line(error)}", value=settings.source,
                         hint="download it again, or take an encoder that transformers can build") from error
    replace_layers(network)
    for name in kind.front:
        network.get_submodule(name).requires_grad_(not options.freeze_front)
    return network
