"""Simplifies ONNX models that torch has made, by public names of onnxscript and onnx_ir alone."""

from __future__ import annotations

import onnx_ir
from onnx_ir.passes import Sequential, common
from onnxscript.optimizer import fold_constants_ir
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.rules import common as rules

_ROUNDS = 2  # as many as torch.onnx.export asks for: what one has folded, the next one rewrites

#: Those of onnxscript's default rules that don't change a value. The others, ``add_0_rule``, ``sub_0_rule``,
#: ``mul_by_1_rule`` and ``div_by_1_rule``, take numbers close to 0 or 1 for 0 or 1: they drop ``x + 1e-8``, so that a
#: silent frame has a logarithm of 0. A runtime itself drops what adds an exact 0.
_EXACT_RULES = (
    rules.two_reshapes_matmul_reshape_rule,
    rules.one_reshape_matmul_reshape_rule,
    rules.cast_constant_of_shape_rule,
    rules.cast_constant_of_shape_without_value_rule,
    rules.collapse_slice_rule,
    rules.collapse_slice2_rule,
    rules.min_min_rule,
    rules.max_max_rule,
    rules.min_max_rule,
    rules.max_min_rule,
    rules.successive_clip_relu_rule,
    rules.successive_relu_clip_rule,
    rules.successive_relu_rule,
    rules.successive_clip_rule,
    rules.cast_cast_rule,
    rules.no_op_cast_rule,
    rules.no_op_expand_rule,
    rules.flatten_to_reshape_rule,  # before reshape_reshape_rule, which takes what it makes
    rules.reshape_reshape_rule,
    rules.slice_split_rule,
    rules.no_op_transpose_rule,
    rules.transpose_transpose_rule,
    rules.unsqueeze_unsqueeze_rule,
    rules.squeeze_reshape_1d_rule,
    rules.no_op_dynamic_scatter_nd_rule,
    rules.no_op_static_scatter_nd_rule,
    rules.normalize_pad_format_conv_rule,
    rules.normalize_pad_format_conv_integer_rule,
    rules.fuse_pad_into_conv_rule,
    rules.fuse_pad_into_conv_integer_rule,
    rules.fuse_batchnorm_into_conv_rule,
    rules.fuse_batchnorm_into_conv_transpose_rule,
    rules.fuse_batchnorm_into_gemm_rule,
    rules.remove_optional_bias_from_conv_rule,
    rules.remove_optional_bias_from_conv_transpose_rule,
    rules.remove_optional_bias_from_qlinear_conv_rule,
    rules.remove_optional_bias_from_gemm_rule,
)


def simplify(model: onnx_ir.Model) -> None:
    """Do in place what ``torch.onnx.export`` does with ``optimize=True``, but keep small numbers."""
    common.InlinePass()(model)
    for _ in range(_ROUNDS):
        fold_constants_ir(model, onnx_shape_inference=True)
        rewrite(model, _EXACT_RULES)
    Sequential(
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)
