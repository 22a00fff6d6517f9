"""Keys by the names that they have in other libraries and programs, for hints about a key that sbkit doesn't know.

To add one, add a row: the name as it is written there, and the key here.
"""

from __future__ import annotations

#: The key of sbkit that does what a key of another library does. A dot leads to a part of a key.
NAMED_ELSEWHERE = {
    "learning_rate": "lr",
    "lr_adam": "lr",
    "lr_wav2vec": "lr",
    "lr_wav2vec2": "lr",
    "lr_whisper": "lr",

    "batch_size": "max_batch_seconds",

    "sorting": "batching.sort",
    "sort": "batching.sort",

    "epochs": "number_of_epochs",
    "n_epochs": "number_of_epochs",
    "num_epochs": "number_of_epochs",
    "max_epochs": "number_of_epochs",
    "N_epochs": "number_of_epochs",
    "num_train_epochs": "number_of_epochs",

    "train": "data_folder",
    "valid": "data_folder",
    "test": "data_folder",
    "dev": "data_folder",
    "train_csv": "data_folder",
    "valid_csv": "data_folder",
    "test_csv": "data_folder",
    "dataset": "data_folder",
    "dataset_dir": "data_folder",
    "data_dir": "data_folder",
    "train_manifest": "data_folder",
    "train_json": "data_folder",
    "train_data": "data_folder",
    "train_ds": "data_folder",
    "validation_ds": "data_folder",
    "test_ds": "data_folder",
    "manifest_filepath": "data_folder",

    "data_root": "corpus.data_root",

    "avoid_if_longer_than": "corpus.max_duration",
    "max_duration": "corpus.max_duration",

    "avoid_if_shorter_than": "corpus.min_duration",
    "min_duration": "corpus.min_duration",

    "vocab_size": "output_neurons",

    "hidden_size": "d_model",

    "workers": "num_workers",

    "fp16": "precision",
    "bf16": "precision",
    "amp": "precision",
    "mixed_precision": "precision",
    "use_amp": "precision",

    "opt": "opt_class",
    "optim": "opt_class",
    "optimizer": "opt_class",
    "Adam": "opt_class",
    "AdamW": "opt_class",
    "SGD": "opt_class",

    "freeze_encoder": "freeze",
    "freeze_encoder_layers": "freeze",
    "freeze_feature_extractor": "freeze",
    "freeze_lm": "freeze",
    "freeze_wav2vec": "freeze",
    "freeze_whisper": "freeze",

    "wav2vec2_hub": "encoder_source",
    "wav2vec2_source": "encoder_source",
    "whisper_hub": "encoder_source",
    "hubert_hub": "encoder_source",
    "wavlm_hub": "encoder_source",

    "character_coverage": "tokenizer.character_coverage",

    "eval_only": "test_only",

    "test_search": "decoder",
    "valid_search": "decoder",
    "test_beam_search": "decoder",
    "beam_searcher": "decoder",

    "fea_augment": "spec_augment",
    "specaug": "spec_augment",

    "wav_augment": "augment",
    "speed_perturb": "augment",

    "use_tensorboard": "loggers",
    "use_wandb": "loggers",

    "early_stopping_patience": "epoch_counter",
    "patience": "epoch_counter",
    "early_stopping": "epoch_counter",

    "grad_clip": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "max_norm": "max_grad_norm",

    "accum_grad": "batching.step_seconds",
    "accumulate_grad_batches": "batching.step_seconds",
    "gradient_accumulation": "batching.step_seconds",
    "gradient_accumulation_steps": "batching.step_seconds",

    "noam_annealing": "schedule",
    "lr_annealing": "schedule",
    "lr_ann": "schedule",
    "lr_scheduler": "schedule",
    "scheduler": "schedule",

    "n_warmup_steps": "schedule.warmup",
    "warmup_steps": "schedule.warmup",

    "pretrained": "init_from",
    "pretrained_path": "init_from",
    "from_pretrained": "init_from",

    "save_dir": "output_folder",
    "out_dir": "output_folder",
    "exp_dir": "output_folder",
}

_TAKES_FOLDER = "It takes a folder, or {train: FILE, dev: FILE, test: FILE}"
_NAMES_PARTS = "It names parts: {Transformer.encoder: true}, or of a pretrained one {encoder: true}"
_MAY_STOP_EARLY = "It may be a !new:speechbrain.utils.epoch_loop.EpochCounterWithStopper"
_IS_AUDIO_OF_UPDATE = "It is the audio of an update, over all devices and micro-batches"

#: What to know about the key here, by its name elsewhere, where its values differ.
REMARKS = {
    "batch_size": "It counts seconds of audio, not utterances",
    "train": _TAKES_FOLDER,
    "valid": _TAKES_FOLDER,
    "test": _TAKES_FOLDER,
    "dev": _TAKES_FOLDER,
    "train_csv": _TAKES_FOLDER,
    "valid_csv": _TAKES_FOLDER,
    "test_csv": _TAKES_FOLDER,
    "train_manifest": _TAKES_FOLDER,
    "train_json": _TAKES_FOLDER,
    "train_ds": _TAKES_FOLDER,
    "manifest_filepath": _TAKES_FOLDER,
    "fea_augment": "It takes no Augmenter, but {time_masks: 5, frequency_width: 27}",
    "freeze_encoder": _NAMES_PARTS,
    "freeze_encoder_layers": _NAMES_PARTS,
    "freeze_wav2vec": _NAMES_PARTS,
    "freeze_whisper": _NAMES_PARTS,
    "early_stopping_patience": _MAY_STOP_EARLY,
    "patience": _MAY_STOP_EARLY,
    "early_stopping": _MAY_STOP_EARLY,
    "wav_augment": "It is a !new:sbkit.data.augment.Augment",
    "use_tensorboard": "It lists names: [tensorboard]",
    "accum_grad": _IS_AUDIO_OF_UPDATE,
    "accumulate_grad_batches": _IS_AUDIO_OF_UPDATE,
    "gradient_accumulation": _IS_AUDIO_OF_UPDATE,
    "gradient_accumulation_steps": _IS_AUDIO_OF_UPDATE,
    "vocab_size": "Pieces of words, more than there are letters, need --token_type unigram",
}

#: Why a key of another library has nothing that corresponds to it here.
NEEDLESS = {
    "skip_prep": "what is prepared is found again",
    "skip_prepare": "what is prepared is found again",
    "dynamic_batching": "a batch always has clips of similar length",
    "use_dynamic_batching": "a batch always has clips of similar length",
    "bucketing": "a batch always has clips of similar length",
    "number_of_ctc_epochs": "CTC has the weight ctc_weight in all epochs",
}

#: Keys elsewhere for what torchrun does here: a process for each device.
DONE_BY_TORCHRUN = {
    "distributed_launch",
    "local_rank",
    "gpus",
    "num_gpus",
    "ngpu",
}

#: Options of torchrun itself, which come before the script's name.
OPTIONS_OF_TORCHRUN = {
    "nproc_per_node",
    "nproc-per-node",
    "nnodes",
    "node_rank",
    "standalone",
    "rdzv_endpoint",
}

#: Keys elsewhere for a search that `sbkit evaluate` does here, and its options for it.
OPTIONS_OF_EVALUATE = {
    "kenlm_model_path": "--lm FILE",
    "lm_weight": "--lm FILE --lm-weight 0.5",
    "ctc_weight_decode": "--joint --ctc-weight 0.4",
    "beam_size": "--lm FILE --beam 16",
    "beam_width": "--lm FILE --beam 16",
    "test_beam_size": "--lm FILE --beam 16",
    "valid_beam_size": "--lm FILE --beam 16",
}
