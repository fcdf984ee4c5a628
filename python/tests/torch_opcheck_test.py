"""Every operator that torch has from quern: fake results against real ones, and torch.library.opcheck.

The arguments are those of the other tests' calls: their cases run once more, and the first call of each
operator that succeeded is kept with copies of its tensors as they were before. torch_opcheck_calls.py has calls of
the others. An operator without a call fails the test: whoever adds a name adds a call.
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

from .torch_opcheck_calls import own_calls, sglang_calls, vllm_calls

_SUITES = ("names", "packed", "peers", "recurrent", "rows", "speculation", "vllm_products", "vllm_states")
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


_ALIASED = "is not defined to alias output but was aliasing"
# opcheck compares arguments with products of themselves, which this PyTorch lacks for fp8.
_FP8_ARGUMENTS = {
    "dynamic_per_token_scaled_fp8_quant", "dynamic_scaled_fp8_quant", "fp8_scaled_mm_cpu", "static_scaled_fp8_quant",
}
# What reads or writes fp8 alone. A PyTorch without fp8 has them, and nothing to call them with.
_NEEDS_FP8 = _FP8_ARGUMENTS | {"quant_fp8", "quantize_fp8e4m3_vec", "static_quant_fp8"}
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
    **{name: ("test_schema", "not implemented for 'Float8_e4m3fn'") for name in _FP8_ARGUMENTS},
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
        return key[0] != "quern" or key[1] in _FP8_ARGUMENTS

    def overload(self, key):
        return getattr(getattr(torch.ops, key[0]), key[1]).default

    def test_every_operator_has_a_call(self):
        self.assertEqual({b for became in self.became.values() for b in became.values()}, {"defined"})
        none = _WITHOUT_FAKE if hasattr(torch, "float8_e4m3fn") else _WITHOUT_FAKE | _NEEDS_FP8
        lacking = [key for key in self.names() if key not in self.calls and key[1] not in none]
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
