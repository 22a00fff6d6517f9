"""The depthwise convolution's GPU kernels against conv1d: in Triton's interpreter, compiled for cards, and on one."""

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from speechbrain.lobes.models.transformer.Conformer import ConvolutionModule
from speechbrain.utils.dynamic_chunk_training import DynChunkTrainConfig

from sbkit.nn.accelerate import accelerate
from sbkit.nn.fast import conformer

triton = pytest.importorskip("triton", minversion="3.6", reason="older interpreters of Triton fail with today's numpy")
#: (frames before, taps, chunk, frames, columns): whole and in chunks, causal, one tap, one frame, other blocks.
CASES = [(3, 7, 99, 75, 70), (3, 7, 8, 75, 70), (7, 15, 16, 33, 64), (30, 31, 50, 41, 5), (0, 1, 4, 9, 3),
         (2, 5, 1, 1, 130), (15, 31, 7, 100, 16)]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def compare(device, dtype, around, taps, chunk, frames, columns):
    """Outputs and gradients with those of conv1d in fp64."""
    from sbkit.nn.fast.depthwise import Depthwise, by_torch, example

    shape = {"around": around, "taps": taps, "chunk": chunk, "frames": frames, "columns": columns}
    types = dtype, dtype, torch.float32, torch.float32  # of outputs, and gradients of inputs, kernel and bias
    for ours, exact, kind in zip(example(Depthwise.apply, device, dtype, **shape),
                                 example(by_torch, "cpu", torch.float64, **shape), types, strict=True):
        assert ours.dtype == kind and ours.shape == exact.shape
        assert (ours.detach().cpu().double() - exact).norm() <= TOLERANCE[dtype] * exact.norm(), (dtype, shape)


@pytest.mark.slow
def test_the_kernels_are_conv1d_in_tritons_interpreter():
    """Which must be chosen before Triton is first imported, hence another process."""
    found = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=500,
                           env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)})
    assert found.returncode == 0, found.stdout + found.stderr


def interpret():
    """What that process does: the function by itself, and in SpeechBrain's layer, whole, in chunks and causal."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)  # its own __index__ fails with numpy 2.4, to which one element is no number
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
    for case in CASES[1:6]:  # the others, larger ones of the same kinds, are for a card
        compare("cpu", torch.float32, *case)
    compare("cpu", torch.float16, *CASES[1])
    for causal, config in ((False, None), (False, DynChunkTrainConfig(4, 1)), (True, None)):
        torch.manual_seed(0)
        module, x = ConvolutionModule(16, 5, causal=causal), torch.randn(2, 19, 16)
        expected = module(x, dynchunktrain_config=config)
        accelerate(module)
        with mock.patch.object(conformer, "own_depthwise", lambda module, x: True):
            found = module(x, dynchunktrain_config=config)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("generation", [80, 90, 100])
def test_the_kernels_compile_for_cards_that_are_not_here(generation):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sbkit.nn.fast import depthwise

    known = {"x": "*bf16", "grad": "*bf16", "out": "*bf16", "kernel": "*fp32", "bias": "*fp32", "sums": "*fp32",
             **dict.fromkeys(("frames", "columns", "chunk"), "i32")}
    fixed = {"TAPS": 31, "AROUND": 15, "BACK": True, "TIME": depthwise.TIME, "WIDE": depthwise.WIDE}
    for kernel in (depthwise.convolve_frames, depthwise.sum_taps):
        constants = {name: value for name, value in fixed.items() if name in kernel.arg_names}
        source = ASTSource(kernel, {name: known.get(name, "constexpr") for name in kernel.arg_names},
                           constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", generation, 32))
        assert made.asm["cubin"] and made.metadata.shared <= 48 << 10


@pytest.mark.gpu(values=True)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_they_are_conv1d(case, dtype):
    assert conformer.depthwise_works.__wrapped__(torch.device("cuda", 0))
    compare("cuda", dtype, *case)


if __name__ == "__main__":
    interpret()
