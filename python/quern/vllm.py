"""vLLM's operators for CPUs by vLLM's names: torch.ops._C.rms_norm(out, x, weight, eps), by Quern.

    import quern.vllm
    quern.vllm.install()

vLLM calls register() in each of its processes where a package names it as an entry point of the group
vllm.general_plugins; README.md shows one. vLLM's own library, if it was loaded before, keeps its schemas, and
its kernels for the CPU are replaced. Equations, roundings and refusals are those of ops/registry; what
differs from vLLM's is in docs/porting.md, docs/porting_ops.md and docs/porting_attention.md.

The schemas are of September 2026. vLLM's own kernels cannot read the pages that cpu_attn_reshape_and_cache
writes, the steps of get_scheduler_metadata, the handlers of create_onednn_mm_handler or what prepack_moe_weight
and prepack_moe_weight_int8 pack. So attention, the products with handlers, the experts and those of int8 are four
families, each of which is installed whole or not at all.

Weights of experts and of cpu_gemm_wna16 are packed for Quern's kernels by the first call that sees them, and kept
with what they were packed from until clear(). A change in place packs them anew, unless PyTorch does not count it:
through `.data`, or of a tensor of inference mode. Call clear() after such a change. Pass the same scales, zero
points and biases in every call: each new tensor packs and keeps the weights again.
"""

from __future__ import annotations

import collections
import importlib
import importlib.util
import itertools
import os
import threading

import torch

from . import _merge_ops, _named, _named_ops, _recurrent_ops, _speculation, _vllm_products
from . import torch as quern_torch
from ._torch_call import name_of_dtype
from ._vllm_products import clear  # noqa: F401

_call = quern_torch.caller_of
_object = quern_torch.object_of


def _rows(x):
    """x as [rows, n]; a view wherever the strides allow it."""
    return x.reshape(-1, x.shape[-1])


def _into(name, x, out, scalars=()):
    """out = op(x), where the operator takes any leading dimensions as rows."""
    rows = out.view(-1, out.shape[-1])
    _call(name)((_rows(x),), scalars, (rows,))


def rms_norm(out, input, weight, epsilon):
    _call("rms_norm")((_rows(input), weight), (epsilon, 0, ""), (out.view(-1, out.shape[-1]),))


def fused_add_rms_norm(input, residual, weight, epsilon):
    shape = (-1, input.shape[-1])
    _call("fused_add_rms_norm")((input.view(shape), residual.view(shape), weight), (epsilon,))


def silu_and_mul(out, input):
    _into("silu_and_mul", input, out)


def gelu_and_mul(out, input):
    _into("gelu_and_mul", input, out, ("none",))


def gelu_tanh_and_mul(out, input):
    _into("gelu_and_mul", input, out, ("tanh",))


def gelu_new(out, input):
    _into("gelu_new", input, out)


def gelu_fast(out, input):
    _into("gelu_fast", input, out)


def gelu_quick(out, input):
    _into("quick_gelu", input, out)


def activation_lut_bf16(out, input, activation):
    _into("activation_lut_bf16", input, out, (activation,))


def static_scaled_int8_quant(out, input, scale, azp):
    """By the scale and the zero point, tensors of one element."""
    terms = (scale.reshape(1), None if azp is None else azp.reshape(1))
    _call("static_scaled_int8_quant")((out, input, *terms), ())


def dynamic_scaled_int8_quant(out, input, scale, azp):
    """Row by row; scale and azp [rows, 1] are written."""
    _call("dynamic_scaled_int8_quant")((out, input, scale, azp), ())


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox, rope_dim_offset=0, inverse=False):
    """Rotates query and key in place, by the table's cosines and sines; inverse: by its angles backward."""
    table = cos_sin_cache[positions.flatten()]
    rot_dim = table.shape[-1]
    if not 0 <= rope_dim_offset <= head_size - rot_dim:
        raise ValueError(
            f"rotary_embedding: rope_dim_offset={rope_dim_offset}; need 0 <= rope_dim_offset <= "
            f"{head_size - rot_dim}, head_size without the {rot_dim} columns of cos_sin_cache"
        )
    cos, sin = (part.contiguous() for part in table.chunk(2, dim=-1))
    if inverse:
        sin = -sin
    part = slice(rope_dim_offset, rope_dim_offset + rot_dim)
    for x in (query, key):
        if x is None:
            continue
        heads = x.view(table.shape[0], -1, head_size)
        rotated = _call("apply_rotary_emb")((heads[..., part].contiguous(), cos, sin), (bool(is_neox), False))
        heads[..., part].copy_(rotated)


# ---- Matrix products --------------------------------------------------------------------------------------


def create_onednn_mm_handler(b, primitive_cache_size):
    handler = _named.OneDnnHandler()
    _call("create_onednn_mm")((b,), (handler, primitive_cache_size))
    return quern_torch.handle(handler)


def create_onednn_scaled_mm_handler(b, b_scales, output_type, dynamic_act_quant, use_azp, primitive_cache_size):
    handler = _named.OneDnnHandler()
    scalars = (name_of_dtype(output_type), dynamic_act_quant, use_azp, handler, primitive_cache_size)
    _call("create_onednn_scaled_mm")((b, b_scales.flatten()), scalars)
    return quern_torch.handle(handler)


def _handler(given):
    """vLLM passes the number in a tensor, and before 2026 as it is."""
    return _object(int(given))


def onednn_mm(c, a, bias, handler):
    _call("onednn_mm")((c, a, bias), (_handler(handler),))


def onednn_scaled_mm(c, a, a_scales, azp, azp_adj, bias, handler):
    _call("onednn_scaled_mm")((c, a, a_scales, azp, azp_adj, bias), (_handler(handler),))


def release_dnnl_matmul_handler(handler):
    quern_torch.release(int(handler))


# ---- Attention --------------------------------------------------------------------------------------------

# Steps that may be scheduled before the first of them is no longer known.
_STEPS = 64
_steps: collections.OrderedDict = collections.OrderedDict()
_step_numbers = itertools.count(1)
_lock = threading.Lock()


def _after_fork():
    global _lock
    _lock = threading.Lock()  # which another thread of the parent may hold for ever


os.register_at_fork(after_in_child=_after_fork)


_spare: list = []


def _metadata():
    """A metadata object that no step has."""
    with _lock:
        return _spare.pop() if _spare else _named.SchedulerMetadata()


def _number(metadata):
    """The number of a step with this metadata; the oldest step beyond _STEPS is forgotten."""
    with _lock:
        number = next(_step_numbers)
        _steps[number] = metadata
        if len(_steps) > _STEPS:
            _spare.append(_steps.popitem(last=False)[1])
        return number


def _step(scheduler_metadata):
    number = int(scheduler_metadata.view(torch.int64)[0])
    metadata = _steps.get(number)
    if metadata is None:
        raise ValueError(f"scheduler_metadata is older than {_STEPS} steps, or not of get_scheduler_metadata")
    return metadata


def get_scheduler_metadata(
    num_req, num_heads_q, num_heads_kv, head_dim, seq_lens, dtype, query_start_loc, causal, window_size, isa_hint,
    enable_kv_split, dynamic_causal=None, kv_cache_dtype="auto",
):
    """A tensor of bytes, as vLLM has it, that holds the step's number. A schedule is one for all kv_cache_dtype."""
    metadata = _metadata()
    scalars = (
        num_req, num_heads_q, num_heads_kv, head_dim, name_of_dtype(dtype), causal, window_size, isa_hint,
        enable_kv_split, metadata,
    )
    _call("cpu_attn_get_scheduler_metadata")((seq_lens, query_start_loc, dynamic_causal), scalars)
    # A step that was refused has no number, and pushes out no other.
    return torch.tensor([_number(metadata)], dtype=torch.int64).view(torch.int8)


def cpu_attn_reshape_and_cache(
    key, value, key_cache, value_cache, slot_mapping, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
):
    scalars = (isa, k_scale, v_scale, kv_cache_dtype)
    _call("cpu_attn_reshape_and_cache")((key, value, key_cache, value_cache, slot_mapping), scalars)


def cpu_attention_with_kv_cache(
    query, key_cache, value_cache, output, query_start_loc, seq_lens, scale, causal, alibi_slopes, block_table,
    softcap, scheduler_metadata, s_aux=None, dynamic_causal=None, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto",
    sliding_window=None, sliding_window_left=-1, sliding_window_right=-1,
):
    if sliding_window is None:  # before 2026 a window had two sides, which did not count the query
        sliding_window = -1 if sliding_window_left < 0 else sliding_window_left + 1
    tensors = (
        query, key_cache, value_cache, output, query_start_loc, seq_lens, alibi_slopes, block_table, s_aux,
        dynamic_causal,
    )
    scalars = (scale, causal, sliding_window, softcap, _step(scheduler_metadata), k_scale, v_scale, kv_cache_dtype)
    _call("cpu_attention_with_kv_cache")(tensors, scalars)


def cpu_attn_has_isa(isa):
    """Whether attention takes this name, which has no effect: the CPU decides."""
    return isa in ("auto", "amx", "vec", "vec16", "neon", "rvv", "vxe", "vsx")


def _fake_writer(*args, **kwargs):
    return None


def _fake_scheduler(*args, **kwargs):
    seq_lens = args[4]
    return seq_lens.new_empty((8,), dtype=torch.int8)


_UNARY = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "gelu_new", "gelu_fast", "gelu_quick")

# The families: what one of their operators makes, only the others can read.
_PRODUCTS = "products with handlers"
_ATTENTION = "attention"

# vLLM's schemas of what writes its arguments and returns nothing, and their families.
_WRITERS = {
    **{f"{name}(Tensor(a0!) out, Tensor input) -> ()": None for name in _UNARY},
    "activation_lut_bf16(Tensor(a0!) out, Tensor input, str activation) -> ()": None,
    "static_scaled_int8_quant(Tensor(a0!) out, Tensor input, Tensor scale, Tensor? azp) -> ()": None,
    "dynamic_scaled_int8_quant(Tensor(a0!) out, Tensor input, Tensor(a2!) scale, Tensor(a3!)? azp) -> ()": None,
    "rms_norm(Tensor(a0!) out, Tensor input, Tensor? weight, float epsilon) -> ()": None,
    "fused_add_rms_norm(Tensor(a0!) input, Tensor(a1!) residual, Tensor? weight, float epsilon) -> ()": None,
    "rotary_embedding(Tensor positions, Tensor(a1!) query, Tensor(a2!)? key, int head_size, "
    "Tensor cos_sin_cache, bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()": None,
    "onednn_mm(Tensor(a0!) c, Tensor a, Tensor? bias, Tensor handler) -> ()": _PRODUCTS,
    "onednn_scaled_mm(Tensor(a0!) c, Tensor a, Tensor a_scales, Tensor? azp, Tensor? azp_adj, Tensor? bias, "
    "Tensor handler) -> ()": _PRODUCTS,
    "cpu_attn_reshape_and_cache(Tensor key, Tensor value, Tensor(a2!) key_cache, Tensor(a3!) value_cache, "
    'Tensor slot_mapping, str isa, float k_scale=1.0, float v_scale=1.0, str kv_cache_dtype="auto") -> ()': _ATTENTION,
    "cpu_attention_with_kv_cache(Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a3!) output, "
    "Tensor query_start_loc, Tensor seq_lens, float scale, bool causal, Tensor? alibi_slopes, int sliding_window, "
    "Tensor block_table, float softcap, Tensor scheduler_metadata, Tensor? s_aux=None, Tensor? dynamic_causal=None, "
    'float k_scale=1.0, float v_scale=1.0, str kv_cache_dtype="auto") -> ()': _ATTENTION,
}
_OTHERS = (
    _named_ops.Operator(
        "create_onednn_mm_handler(Tensor b, int primitive_cache_size) -> int",
        create_onednn_mm_handler, None, _PRODUCTS,
    ),
    _named_ops.Operator(
        "create_onednn_scaled_mm_handler(Tensor b, Tensor b_scales, ScalarType output_type, bool dynamic_act_quant, "
        "bool use_azp, int primitive_cache_size) -> int",
        create_onednn_scaled_mm_handler, None, _PRODUCTS,
    ),
    _named_ops.Operator(
        "release_dnnl_matmul_handler(int handler) -> ()", release_dnnl_matmul_handler, None, _PRODUCTS
    ),
    _named_ops.Operator(
        "get_scheduler_metadata(int num_req, int num_heads_q, int num_heads_kv, int head_dim, Tensor seq_lens, "
        "ScalarType dtype, Tensor query_start_loc, bool causal, int window_size, str isa_hint, bool enable_kv_split, "
        "Tensor? dynamic_causal=None) -> Tensor",
        get_scheduler_metadata, _fake_scheduler, _ATTENTION,
    ),
    _named_ops.Operator("cpu_attn_has_isa(str isa) -> bool", cpu_attn_has_isa, None, _ATTENTION),
)


def _operators():
    for schema, family in _WRITERS.items():
        yield _named_ops.Operator(schema, globals()[schema.partition("(")[0]], _fake_writer, family)
    yield from _OTHERS
    yield from _merge_ops.VLLM
    yield from _recurrent_ops.VLLM
    yield from _speculation.VLLM
    yield from _vllm_products.OPERATORS


def install(namespace: str = "_C") -> dict:
    """Puts all of them under torch.ops._C; returns what became of each: "defined", "replaced", or why not.

    What was left out is also a warning of the logger "quern".
    """
    return _named_ops.install(namespace, _operators())


def register() -> dict:
    """What the entry point names. vLLM calls it once or more in every process. Returns what install() does.

    vLLM's own library is loaded first, because PyTorch lets nobody define an operator twice. vLLM drops the
    result, so what was left out is a warning of the logger "quern" here, too.
    """
    if importlib.util.find_spec("vllm") is not None:
        platform = importlib.import_module("vllm.platforms").current_platform
        if hasattr(platform, "import_kernels"):
            platform.import_kernels()
        else:
            importlib.import_module("vllm._C")
    return install()
