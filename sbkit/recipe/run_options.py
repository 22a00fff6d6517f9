"""SpeechBrain's run options by name, written down here because importing SpeechBrain takes seconds.

A test compares them with those of the installed SpeechBrain.
"""

#: Options of SpeechBrain's Brain, which a recipe may have as keys.
RUN_OPTIONS = (
    "test_only", "debug", "debug_batches", "debug_epochs", "debug_persistently", "device", "data_parallel_backend",
    "data_parallel_count", "distributed_backend", "distributed_launch", "find_unused_parameters", "jit",
    "jit_module_keys", "compile", "compile_module_keys", "compile_mode", "compile_using_fullgraph",
    "compile_using_dynamic_shape_tracing", "precision", "eval_precision", "auto_mix_prec", "bfloat16_mix_prec",
    "max_grad_norm", "skip_nonfinite_grads", "nonfinite_patience", "noprogressbar", "ckpt_interval_minutes",
    "ckpt_interval_steps", "grad_accumulation_factor", "optimizer_step_limit", "tqdm_colored_bar", "tqdm_barcolor",
    "remove_vector_weight_decay", "profile_training", "profile_warmup", "profile_steps", "log_config", "param_file",
)
#: Those that don't change what is trained.
NOT_OF_TRAINING = frozenset({"param_file", "test_only", "noprogressbar", "tqdm_colored_bar", "log_config", "device",
                             "local_rank"})
