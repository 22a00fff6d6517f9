"""The checks, the most valuable first, and what is expected of each line."""

from __future__ import annotations

from sbkit.doctor.gpu.check import Check, Expect

#: Targets: a step against stock SpeechBrain's best precision, MFU of large.yaml, share of a step waiting for data.
STEP_RATIO, LEAST_MFU, MOST_DATA_WAIT = 2.5, 0.35, 0.02
#: The same of a step that fine-tunes a pretrained encoder, most of which is transformers' own code on both sides.
FINETUNE_RATIO = 1.5

_STOCK = (
    Expect("step", "a step against stock SpeechBrain", f"at least {STEP_RATIO} times stock's best precision"),
    Expect("epoch", "an epoch against stock", "no slower than stock's best"),
    Expect("validation", "a validation against stock", "no slower than stock's best"),
)
_TRAINED = (
    Expect("waits", "the host waits for the card", "in no step"),
    Expect("data", "share of a step that waits for data", f"below {100 * MOST_DATA_WAIT:.0f} %"),
    Expect("learns", "training loss", "finite and falling, no step skipped"),
)

CHECKS: tuple[Check, ...] = (
    Check("kernels", "CTC kernels and sbkit's layers against their references", ".kernels:check", 25, (
        Expect("used", "CTC by sbkit's kernels", "they compile and pass their rehearsal"),
        Expect("losses", "CTC losses of 5, 40, 130, 300 and 1023 labels", "within 1e-4 of torch's"),
        Expect("gradients", "their gradients", "within 5e-3 of torch's in fp64, of 1023 labels within 0.02"),
        Expect("fp32", "the flagship's loss and gradients with sbkit's layers, fp32", "within 1e-3 of SpeechBrain's"),
        Expect("bf16", "the same in bf16", "within 10 % of SpeechBrain's"),
        Expect("dropout", "dropout of 10 %", "drops 9.5 to 10.5 %, scales the rest by 1/0.9"))),
    Check("training", "sbkit train with the flagship", ".training:flagship", 45, _TRAINED),
    Check("flagship", "tools/bench_train.py with the flagship", ".speed:flagship", 80, _STOCK),
    Check("large", "tools/bench_train.py with large.yaml, CTC alone", ".speed:large", 70, (
        *_STOCK, Expect("mfu", "model FLOPs utilisation of a step", f"at least {100 * LEAST_MFU:.0f} %"))),
    Check("joint", "sbkit train with large.yaml, as it stands", ".training:large", 35, _TRAINED),
    Check("finetune", "tools/bench_finetune.py with an encoder of wav2vec 2.0's base size", ".speed:finetuning", 40, (
        Expect("step", "a step of fine-tuning against SpeechBrain's wrapper and Brain",
               f"at least {FINETUNE_RATIO} times their best precision"),)),
    Check("pair", "two cards, over NCCL", ".pair:check", 40, (
        Expect("fails", "one rank fails before an all-reduce", "all end within 10 s", cards=2),
        Expect("equal", "weights of both ranks", "equal in every bit", cards=2),
        Expect("same", "training loss of an epoch on one card and on two", "within 1 %", cards=2),
        Expect("overlap", "communication that runs beside the backward", "at least 50 %", cards=2))),
    Check("precisions", "sbkit train in fp16 and bf16, compiled, as CUDA graphs", ".precisions:check", 60, (
        Expect("bf16", "bf16", "loss falls, no step skipped"),
        Expect("fp16", "fp16, batches of 2000 s", "loss falls, at most 3 steps skipped, none after the first epoch"),
        Expect("compile", "--compile", "no graph compiled after the first epoch, loss as without"),
        Expect("graphs", "--compile --compile_mode reduce-overhead", "the same"))),
    Check("ship", "sbkit export, transcribe and the engine on the card", ".ship:check", 45, (
        Expect("export", "sbkit export", "a bundle whose formats agree"),
        Expect("torch", "transcribe --model torch on the card", "the words of the CPU's ONNX model"),
        Expect("onnx", "transcribe --model onnx on the card", "the same"),
        Expect("threads", "compiled with reduce-overhead, asked by 32 threads", "the same words, no error"))),
    Check("attention", "attention's kernels by shape", ".attention:check", 25, (
        Expect("finite", "gradients of masked bf16 attention, without cuDNN's", "finite for 24 lengths"),
        Expect("shapes", "a new shape, with cuDNN's attention off and on", "no slower off than on"),
        Expect("heads", "the kernel for the heads of the flagship and of large.yaml", "a fused one"),
        Expect("rounding", "steps of new lengths, rounded to nothing, 0.32 s and 1.28 s",
               "the rounding that training chooses within 15 % of the best"))),
    Check("memory", "peak memory of a step against sbkit check's bill", ".memory:check", 20, (
        Expect("flagship", "the flagship", "within 15 %"), Expect("large", "large.yaml", "within 15 %"))),
    Check("resume", "SIGTERM in the midst of an epoch, and the same command again", ".resume:check", 35, (
        Expect("stops", "SIGTERM", "a checkpoint, exit code 143"),
        Expect("exact", "weights after resuming", "as near to those of a run never stopped as two such runs are"),
        Expect("second", "the same on cuda:1", "the same", cards=2))),
    Check("tests", "pytest -m gpu", ".suite:check", 50, (
        Expect("tests", "all tests marked gpu", "pass"),)),
)
