"""Every operator that torch has from quern: fake results against real ones, and torch.library.opcheck.

The arguments are those of the other tests' calls: their cases run once more, and the first call of each
operator that succeeded is kept with copies of its tensors as they were before. own_calls has the operators that
no test calls through torch, and vllm_calls those whose arguments name objects. An operator without a call fails
the test: whoever adds a name adds a call.
"""

import functools
import importlib
import io
import sys
import unittest

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import quern
import quern.sglang
import quern.torch
import quern.vllm
from quern import _named_ops, _torch_call

_SUITES = ("names", "packed", "peers", "recurrent", "rows", "speculation")
_HAS_OPCHECK = hasattr(torch.library, "opcheck")

# What a model calls when it is loaded: they make or free objects, or say what there is, and return no tensor that
# a fake could stand for.
_WITHOUT_FAKE = {
    "cpu_attn_has_isa", "create_onednn_mm_handler", "create_onednn_scaled_mm_handler", "release_dnnl_matmul_handler",
}


def _copy(value):
    """A tensor with the same strides and elements, or what is no tensor."""
    if isinstance(value, torch.Tensor):
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return copy.copy_(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(v) for v in value)
    return value


class _Recorder(TorchDispatchMode):
    """Keeps the first call of each operator of the namespaces that succeeds."""

    def __init__(self, namespaces):
        super().__init__()
        self.namespaces, self.calls = namespaces, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        if namespace not in self.namespaces or (namespace, name) in self.calls:
            return func(*args, **kwargs)
        before = _copy(tuple(args)), {k: _copy(v) for k, v in kwargs.items()}
        result = func(*args, **kwargs)
        self.calls[namespace, name] = before
        return result


def _record():
    """({(namespace, name): (args, kwargs)}, {name of quern: kwargs}) of the calls of all tests."""
    direct = {}
    call = _torch_call.Caller.__call__

    @functools.wraps(call)
    def recording(self, tensors, scalars, outs=None):
        name = self.schema.name
        before = None if name in direct else tuple(_copy(x) for x in tensors)
        result = call(self, tensors, scalars, outs)
        if before is not None:
            others = [p.name for p in self.schema.parameters if p.kind != "Tensor"]
            direct[name] = {**dict(zip(self.names, before)), **dict(zip(others, scalars))}
        return result

    suites = [importlib.import_module(f"{__package__}.torch_{name}_test") for name in _SUITES]
    suites.append(importlib.import_module(f"{__package__}.torch_test"))
    recorder = _Recorder({"quern", *_named_ops._installed})
    _torch_call.Caller.__call__ = recording
    try:
        for module in suites:
            with recorder:
                cases = unittest.defaultTestLoader.loadTestsFromModule(module)
                unittest.TextTestRunner(stream=io.StringIO()).run(cases)
    finally:
        _torch_call.Caller.__call__ = call
    return recorder.calls, direct


def _linear(n, k):
    return quern.Linear.from_numpy(torch.randn(n, k) / 16)


def _starts(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def own_calls():
    """{name: keyword arguments} of operators of quern that no other test calls through torch."""
    x, w, bias, slots = torch.randn(4, 16), torch.randn(16), torch.randn(32), torch.arange(4, dtype=torch.int32)
    wide, weight = torch.randn(4, 64), torch.randn(32, 64)
    heads = torch.randn(4, 2, 8)
    experts = quern.ExpertWeights(
        [quern.Linear.from_numpy(torch.randn(32, 16) / 16, gated=True) for _ in range(4)],
        [_linear(16, 16) for _ in range(4)],
    )
    routes = {"topk_weights": torch.rand(4, 2), "topk_ids": torch.randint(0, 4, (4, 2), dtype=torch.int32)}
    router = {"router_logits": torch.randn(4, 4), "top_k": 2, "hidden_states": x, "experts": experts}
    rule = {
        "q": torch.randn(4, 1, 4), "k": torch.randn(4, 1, 4), "v": heads, "g": -torch.rand(4, 2),
        "beta": torch.rand(4, 2), "state": torch.zeros(5, 2, 4, 8), "state_indices": slots,
    }
    layer = {"x": x, "state_indices": slots}

    def conv(channels, width):
        return {"conv_weight": torch.randn(channels, width), "conv_state": torch.zeros(5, width - 1, channels)}

    def products(names, *sizes):
        return {name: _linear(*size) for name, size in zip(names, sizes)}

    mamba = ("in_proj", "x_proj", "dt_proj", "out_proj")
    greedy = {
        "output_token_ids": torch.zeros(3, 4, dtype=torch.int64), "cu_num_draft_tokens": torch.tensor([1, 3, 4]),
        "draft_token_ids": torch.tensor([1, 2, 3, 4]), "bonus_token_ids": torch.tensor([[5], [6], [7]]),
    }
    probs = {"target_probs": torch.rand(4, 8), "draft_probs": torch.rand(4, 8)}
    packed = torch.ops.quern.convert_weight_packed(torch.randint(-9, 9, (32, 64), dtype=torch.int8))
    calls = {
        "adjust_logits": {"logits": wide, "repetition": torch.full((4,), 1.5), "prompt_ids": slots,
                          "prompt_starts": _starts(0, 1, 2, 3, 4)},
        "causal_conv1d_update": {"x": x, "conv_state": torch.zeros(5, 3, 16), "weight": torch.randn(16, 4),
                                 "conv_state_indices": slots},
        "chunk_gated_delta_rule": dict(rule, query_start_loc=_starts(0, 1, 2, 3, 4)),
        "column_parallel_linear": {"x": wide, "weight": weight, "bias": bias},
        "conv3d": {"x": torch.randn(1, 2, 3, 4, 5), "weight": torch.randn(4, 2, 2, 2, 2)},
        "copy_stub": {"out": torch.empty(4, 16), "input": x},
        "expand_to_tokens": {"output": torch.zeros(4, dtype=torch.int64), "input": torch.tensor([1, 2, 3]),
                             "cu_num_tokens": torch.tensor([1, 3, 4])},
        "fatrelu_and_mul": {"x": x, "threshold": 0.5},
        "fused_add_rms_norm_quant": {"x": x, "residual": x + 1, "weight": w, "q_dtype": "int8"},
        "fused_add_rms_norm_static_quant": {"x": x, "residual": x + 1, "weight": w, "scale": 0.5,
                                            "q_dtype": "int8"},
        "fused_moe": router,
        "gated_delta_net": dict(
            layer, **products(("in_proj", "out_proj"), (28, 16), (16, 8)), **conv(16, 4),
            state=torch.zeros(5, 2, 4, 4), a_log=torch.rand(2), dt_bias=torch.rand(2), norm=torch.ones(4),
            num_k_heads=1,
        ),
        "gated_delta_rule_update": rule,
        "gelu_and_mul_sparse": {"x": x},
        "gelu_quick": {"x": x},
        "gelu_tanh_and_mul": {"x": x},
        "int8_scaled_mm_with_quant": {"mat1": wide, "mat2": packed, "scales2": torch.rand(32), "is_vnni": True},
        "layer_norm": {"x": x, "weight": w, "bias": w},
        "mamba_mixer": dict(
            layer, **products(mamba, (24, 16), (7, 12), (12, 3), (16, 12)), **conv(12, 4),
            ssm_state=torch.zeros(5, 1, 12, 2), a=-torch.rand(1, 12, 2), d=torch.rand(1, 12),
        ),
        "mamba_mixer2": dict(
            layer, **products(("in_proj", "out_proj"), (31, 16), (16, 12)), **conv(16, 4),
            ssm_state=torch.zeros(5, 3, 4, 2), a=-torch.rand(3), norm=torch.ones(12),
        ),
        "merge_states": {"prefix": heads, "prefix_lse": torch.rand(4, 2), "suffix": heads + 1, "suffix_lse": torch.rand(4, 2)},
        "mixer2_gated_rms_norm": {"x": x, "gate": x + 1, "weight": w},
        "modular_fused_moe": dict(routes, hidden_states=x, experts=experts),
        "mrope": {"positions": torch.arange(12).reshape(3, 4), "query": heads, "max_position": 16, "section_t": 1,
                  "section_h": 1, "section_w": 2},
        "pack_vnni": {"weight": torch.randn(32, 64).bfloat16()},
        "parallel_lm_head": {"hidden": wide, "weight": weight, "vocab": 32},
        "plamo2_mamba_mixer": dict(
            layer, **products(mamba, (24, 16), (7, 12), (3, 3), (16, 12)), **conv(12, 4),
            ssm_state=torch.zeros(5, 3, 4, 2), a=-torch.rand(3), dt_norm=torch.ones(3), b_norm=torch.ones(2),
            c_norm=torch.ones(2),
        ),
        "rejection_sample": dict(greedy, **probs, recovered_token_ids=torch.tensor([4, 3, 2, 1]),
                                 uniform_probs=torch.rand(4)),
        "rejection_sample_greedy": dict(greedy, target_argmax=torch.tensor([1, 2, 4, 4])),
        "rms_norm_static_quant": {"x": x, "weight": w, "scale": 0.5, "q_dtype": "int8"},
        "row_parallel_linear": {"x": wide, "weight": weight, "bias": bias},
        "s8s8_compensation": {"packed": packed},
        "sample_recovered_tokens": dict(
            probs, output_token_ids=torch.zeros(4, dtype=torch.int64), inv_q=torch.rand(3, 8),
            cu_num_draft_tokens=greedy["cu_num_draft_tokens"], draft_token_ids=greedy["draft_token_ids"],
        ),
        "selective_state_update": {
            "state": torch.zeros(5, 2, 8, 4), "x": heads, "dt": torch.rand(4, 2), "a": -torch.rand(2),
            "b": torch.randn(4, 1, 4), "c": torch.randn(4, 1, 4), "state_batch_indices": slots,
        },
        "short_conv": dict(layer, **products(("in_proj", "out_proj"), (36, 16), (16, 12)), **conv(12, 3)),
        "token_logprobs": {"logits": wide, "ids": torch.zeros(4, 2, dtype=torch.int32), "top_n": 5},
        "topk_sigmoid": {"gating_output": wide, "topk": 6},
        "transformers_fused_moe": dict(routes, hidden_states=x, experts=experts),
        "unquantized_fused_moe": router,
        "varlen_attention": {"query": heads, "key": heads, "value": heads, "cu_seqlens_q": _starts(0, 3, 4),
                             "cu_seqlens_k": _starts(0, 3, 4), "causal": True},
        "weight_packed_linear": {"mat1": wide, "mat2": weight, "is_vnni": False},
        "xielu": {"x": x, "alpha_p": 0.8, "alpha_n": 0.8},
    }
    if hasattr(torch, "float8_e4m3fn"):
        codes = weight.to(torch.float8_e4m3fn)
        calls["fp8_scaled_mm_cpu"] = {"mat1": wide.bfloat16(), "mat2": codes, "scales2": torch.rand(1, 1),
                                      "block_n": 128, "block_k": 128, "is_vnni": False}
        calls["quant_fp8"] = {"x": x}
        calls["static_quant_fp8"] = {"x": x, "scale": torch.rand(1, 1)}
    return calls


def vllm_calls(ops):
    """{name: arguments} of vLLM's families of operators, which name objects by numbers. ops: where they are."""
    weight, codes = torch.randn(32, 8), torch.randint(-9, 9, (8, 32), dtype=torch.int8).t()
    handler = torch.tensor(ops.create_onednn_mm_handler(weight, 128))
    scaled = (codes, torch.rand(1, 8), torch.float32, True, False, 128)
    scaled_handler = torch.tensor(ops.create_onednn_scaled_mm_handler(*scaled))
    caches = [torch.zeros(4, 2, 16, 32) for _ in range(2)]
    keys, slots = torch.randn(2, 20, 2, 32), torch.arange(20)
    ops.cpu_attn_reshape_and_cache(keys[0], keys[1], *caches, slots, "vec")
    lens, starts = torch.tensor([20], dtype=torch.int32), _starts(0, 3)
    step = (1, 4, 2, 32, lens, torch.float32, starts, True, -1, "vec", True)
    query, table = torch.randn(3, 4, 32), torch.tensor([[0, 1]], dtype=torch.int32)
    return {
        "cpu_attention_with_kv_cache": (
            query, *caches, torch.empty(3, 4, 32), starts, lens, 0.2, True, None, -1, table, 0.0,
            ops.get_scheduler_metadata(*step),
        ),
        "cpu_attn_reshape_and_cache": (keys[0], keys[1], *caches, slots, "vec"),
        "get_scheduler_metadata": step,
        "onednn_mm": (torch.empty(4, 8), torch.randn(4, 32), None, handler),
        "onednn_scaled_mm": (
            torch.empty(4, 8), torch.randint(-9, 9, (4, 32), dtype=torch.int8), torch.rand(4, 1), None, None, None,
            scaled_handler,
        ),
    }


def sglang_calls():
    """{name: arguments} of operators of SGLang's names that no other test calls through torch."""
    x, heads, rows = torch.randn(6, 32).bfloat16(), torch.randn(6, 2, 8), _starts(0, 4, 6)
    # 2 heads of 8 and 4 columns, and latents of 16 and 24.
    q_a, kv_a, q_b = (torch.randn(*shape).bfloat16() / 8 for shape in ((16, 32), (28, 32), (24, 16)))
    tail = (
        torch.randn(2, 24, 8).bfloat16(), torch.ones(16).bfloat16(), torch.ones(24).bfloat16(), torch.arange(6),
        torch.randn(6, 4).bfloat16(), 1e-6, False, False,
    )
    calls = {
        "flash_attn_varlen_func": (heads, heads, heads, rows, rows, 4, 4, True),
        "qkv_proj_with_rope": (x, q_a, q_b, kv_a, *tail, None, None, None, None, False, None),
        "qkv_proj_with_rope_fused_weight": (
            x, torch.cat((q_a, kv_a)), q_b, *tail, None, None, None, False, None, 16, 24, 4
        ),
    }
    if hasattr(torch, "float8_e4m3fn"):
        weight = torch.randn(32, 128).to(torch.float8_e4m3fn)
        mat1 = torch.randn(4, 128).bfloat16()
        calls["fp8_scaled_mm_cpu"] = mat1, weight, torch.rand(1, 1), [128, 128], None, torch.bfloat16, False
    return calls


_ALIASED = "is not defined to alias output but was aliasing"
# Checks that fail, and what they say: how a project declared its operator, or a gap of opcheck.
_KNOWN = {
    # The result is an argument where `inplace` is given. PyTorch compiles no operator that says so.
    "fused_sigmoid_mul_cpu": ("test_aot_dispatch_dynamic", "whose output has alias annotations"),
    # They return arguments, which the projects' schemas do not say and which PyTorch would not compile.
    "apply_rotary_pos_emb_cpu": ("test_schema", _ALIASED),
    "chunk_gated_delta_rule_cpu": ("test_schema", _ALIASED),
    "multimodal_rotary_embedding_cpu": ("test_schema", _ALIASED),
    "rotary_embedding_cpu": ("test_schema", _ALIASED),
    # The values are the beginning of each row of the keys, as SGLang's cache of MLA has them.
    "qkv_proj_with_rope": ("test_schema", "Outputs 1 and 2 alias"),
    "qkv_proj_with_rope_fused_weight": ("test_schema", "Outputs 1 and 2 alias"),
    # opcheck compares arguments with products of themselves, which this PyTorch lacks for fp8.
    "fp8_scaled_mm_cpu": ("test_schema", "not implemented for 'Float8_e4m3fn'"),
}
_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
# What is returned is the number of a step, which the next call has another of.
_RETURNS_NUMBERS = {"get_scheduler_metadata"}
_PROJECTS = {"quern_test_opcheck_vllm": quern.vllm, "quern_test_opcheck_sglang": quern.sglang}


class OpcheckTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.became = {namespace: project.install(namespace) for namespace, project in _PROJECTS.items()}
        torch.manual_seed(7)
        recorded, direct = _record()
        torch.manual_seed(7)
        # {(namespace, name): (args, kwargs)}; objects become numbers, which keep them.
        cls.calls = {key: call for key, call in recorded.items() if key[0] == "quern"}
        for name, kwargs in {**direct, **own_calls()}.items():
            cls.calls.setdefault(("quern", name), ((), cls.given(name, kwargs)))
        for namespace, became in cls.became.items():
            for (other, name), (args, kwargs) in recorded.items():
                if name in became and set(_named_ops._installed.get(other, ())) >= set(became):
                    kwargs = {_named_ops._ALIASES.get(k, k): v for k, v in kwargs.items()}
                    cls.calls.setdefault((namespace, name), (args, kwargs))
        vllm = "quern_test_opcheck_vllm"
        for name, args in vllm_calls(getattr(torch.ops, vllm)).items():
            cls.calls[vllm, name] = args, {}
        for name, args in sglang_calls().items():
            cls.calls["quern_test_opcheck_sglang", name] = args, {}
        # What both projects have, and a test of one of them calls.
        for name in set(cls.became[vllm]) & set(cls.became["quern_test_opcheck_sglang"]):
            call = cls.calls.get(("quern_test_opcheck_sglang", name))
            if call is not None:
                cls.calls.setdefault((vllm, name), call)

    @staticmethod
    def given(name, kwargs):
        """Arguments as torch takes them: numbers for objects, and without those that it lacks or that are None."""
        schema = quern.library().schema(name)
        kept = {p.name for p in quern.torch._parameters(schema)}
        objects = tuple(quern.torch._OBJECTS.values())
        return {
            key: quern.torch.handle(value) if isinstance(value, objects) else value
            for key, value in kwargs.items()
            if value is not None and key in kept
        }

    def names(self):
        """(namespace, name) of all operators that torch has."""
        for name in quern.torch.names:
            yield "quern", name
        for namespace, became in self.became.items():
            for name in became:
                yield namespace, name

    @staticmethod
    def is_known(key):
        """Ours return new tensors, so only what is wrong with opcheck is wrong with them."""
        return key[0] != "quern" or key[1] == "fp8_scaled_mm_cpu"

    def overload(self, key):
        return getattr(getattr(torch.ops, key[0]), key[1]).default

    def test_every_operator_has_a_call(self):
        self.assertEqual({b for became in self.became.values() for b in became.values()}, {"defined"})
        lacking = [key for key in self.names() if key not in self.calls and key[1] not in _WITHOUT_FAKE]
        self.assertEqual(lacking, [])
        self.assertGreater(len(self.calls), 200)

    def test_fake_results_are_like_real_ones(self):
        """With every PyTorch: meta tensors give the dtypes, shapes and strides of a call."""
        for key in self.names():
            if key[1] in _WITHOUT_FAKE or key not in self.calls:
                continue
            with self.subTest("::".join(key)), torch.no_grad():
                args, kwargs = self.calls[key]

                def meta(value):
                    if not isinstance(value, torch.Tensor):
                        return value
                    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

                fake = self.overload(key)(*map(meta, args), **{k: meta(v) for k, v in kwargs.items()})
                real = self.overload(key)(*_copy(args), **{k: _copy(v) for k, v in kwargs.items()})
                self.assertEqual(self.metas(fake), self.metas(real))

    @staticmethod
    def metas(result):
        results = result if isinstance(result, (list, tuple)) else [] if result is None else [result]
        return [(t.dtype, t.shape, t.stride()) for t in results]

    def test_opcheck(self):
        """torch.library.opcheck: schemas, fakes, autograd, and torch.compile's view of each operator."""
        if not _HAS_OPCHECK:
            said = f"PyTorch {torch.__version__} has no torch.library.opcheck: none of {len(self.calls)} calls checked"
            print(f"\nNOT CHECKED: {said}", file=sys.stderr, flush=True)
            self.skipTest(said)
        for key in self.names():
            if key[1] in _WITHOUT_FAKE or key not in self.calls:
                continue
            args, kwargs = self.calls[key]
            for check in _CHECKS:
                if key[1] in _RETURNS_NUMBERS and check == "test_aot_dispatch_dynamic":
                    continue
                with self.subTest("::".join((*key, check))), torch.no_grad():
                    given = _copy(args), {k: _copy(v) for k, v in kwargs.items()}
                    known, said = _KNOWN.get(key[1], ("", "")) if self.is_known(key) else ("", "")
                    if check != known:
                        torch.library.opcheck(self.overload(key), *given, test_utils=check)
                        continue
                    with self.assertRaisesRegex(Exception, said):
                        torch.library.opcheck(self.overload(key), *given, test_utils=check)


if __name__ == "__main__":
    unittest.main()
