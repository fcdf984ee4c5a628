"""Calls of operators for torch_opcheck_test.py, which no other test makes through torch."""

import torch

import quern

def _linear(n, k):
    return quern.Linear.from_numpy(torch.randn(n, k) / 16)


def _starts(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def _int4(k, n, groups):
    """(x, w, w_zeros, w_scales) of int4_scaled_mm_cpu."""
    words = torch.randint(0, 1 << 30, (k, n // 8), dtype=torch.int32)
    zeros = torch.randint(0, 1 << 30, (groups, n // 8), dtype=torch.int32)
    w = torch.ops.quern.convert_weight_packed_scale_zp(words, zeros, torch.rand(groups, n), 0)
    return (torch.randn(4, k).bfloat16(), *w)


def _latent(*names):
    """The arguments of qkv_proj_with_rope: 2 heads of 8 and 4 columns, and latents of 16 and 24."""
    shapes = {"q_a_proj_weight": (16, 32), "kv_a_proj_weight": (28, 32), "qkv_a_proj_weight": (44, 32)}
    return {
        **{name: torch.randn(shapes[name]).bfloat16() / 8 for name in names},
        "hidden_states": torch.randn(6, 32).bfloat16(), "q_b_proj_weight": torch.randn(24, 16).bfloat16() / 8,
        "w_kc": torch.randn(2, 24, 8).bfloat16(), "q_a_layernorm_weight": torch.ones(16).bfloat16(),
        "kv_a_layernorm_weight": torch.ones(24).bfloat16(), "positions": torch.arange(6),
        "cos_sin_cache": torch.randn(6, 4).bfloat16(), "eps": 1e-6, "is_vnni": False,
    }


def _own_products():
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    names = ("x", "w", "w_zeros", "w_scales")
    fused = {"q_lora_rank": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 4}
    calls = {
        "bmm_cpu": {"out": torch.empty(2, 3, 32).bfloat16(), "mat1": torch.randn(2, 3, 64).bfloat16(),
                    "mat2": torch.randn(2, 32, 64).bfloat16(), "is_vnni": False},
        "conv3d_embed_cpu": {"input": torch.randn(4, 2, 2, 4, 4), "weight": torch.randn(32, 2, 2, 4, 4),
                             "bias": torch.randn(32), "is_vnni": False},
        "conv3d_embed_weight_pack": {"weight": torch.randn(32, 2, 2, 4, 4).bfloat16()},
        "cpu_gemm_wna16": {"input": torch.randn(4, 32), "q_weight": torch.randint(0, 1 << 30, (2, 64)).int(),
                           "output": torch.empty(4, 32), "scales": torch.rand(2, 32)},
        "fused_input_proj_cpu": {"hidden_states": x, "qkvz_weight": weight, "ba_weight": weight[:16], "is_vnni": False},
        "fused_linear_sigmoid_mul": {"mat1": x, "mat2": weight[:1], "is_vnni": False,
                                     "post_mul_mat": torch.randn(4, 32).bfloat16()},
        "int4_scaled_mm_cpu": dict(zip(names, _int4(64, 32, 2))),
        "mxfp4_scaled_mm_cpu": {
            "mat1": x, "mat2": torch.randint(0, 256, (32, 32)).to(torch.uint8),
            "scales2": torch.randint(120, 130, (32, 2)).to(torch.uint8), "is_vnni": False,
        },
        "qkv_proj_with_rope": _latent("q_a_proj_weight", "kv_a_proj_weight"),
        "qkv_proj_with_rope_fused_weight": dict(_latent("qkv_a_proj_weight"), **fused),
        "shared_expert_cpu": {"hidden_states": x, "w1": torch.randn(64, 64).bfloat16(),
                              "w2": torch.randn(64, 32).bfloat16(), "fused_experts_out": x + 1,
                              "is_vnni": False},
    }
    codes = torch.randint(-9, 9, (32, 64), dtype=torch.int8)
    mat1, scales1 = torch.ops.quern.per_token_quant_int8_cpu(x)
    calls["int8_scaled_mm_cpu"] = {"mat1": mat1, "mat2": codes, "scales1": scales1, "scales2": torch.rand(32),
                                   "out_dtype": "bf16", "is_vnni": False}
    return calls


def _own_experts():
    w13, w2 = torch.randn(4, 32, 16), torch.randn(4, 16, 16)
    int8 = [torch.randint(-99, 99, w.shape, dtype=torch.int8) for w in (w13, w2)]
    step = {
        "input": torch.randn(4, 16), "output": torch.empty(4, 16), "topk_weights": torch.rand(4, 2),
        "topk_id": torch.randint(0, 4, (4, 2), dtype=torch.int32),
    }
    return {
        "cpu_fused_moe": dict(step, w13=w13, w2=w2),
        "cpu_fused_moe_int8": dict(
            step, w13=int8[0], w2=int8[1], w13_scale=torch.rand(4, 32), w2_scale=torch.rand(4, 16)
        ),
        "get_scheduler_metadata": {
            "num_req": 1, "num_heads_q": 4, "num_heads_kv": 2, "head_dim": 32, "causal": True, "dtype": "f32",
            "seq_lens": torch.tensor([20], dtype=torch.int32), "query_start_loc": _starts(0, 3),
            "scheduler_metadata": quern.SchedulerMetadata(),
        },
        "prepack_moe_weight": {"weight": w13, "packed_weight": torch.empty_like(w13)},
        "prepack_moe_weight_int8": {"weight": int8[0], "packed_weight": torch.empty_like(int8[0])},
    }


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
        **_own_products(),
        **_own_experts(),
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
        "flash_attn_varlen_func": {
            "q": heads, "k": heads, "v": heads, "cu_seqlens_q": _starts(0, 3, 4), "cu_seqlens_k": _starts(0, 3, 4),
            "max_seqlen_q": 3, "max_seqlen_k": 3, "causal": True,
        },
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
        "shm_all_gather": {"data": x, "output": torch.empty(1, 4, 16)},
        "shm_allgather": {"data": x, "dim": -1},
        "shm_allreduce": {"data": x},
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
        # Tokens last, which are turned on the way in and out.
        "causal_conv1d_update_cpu_vec": (
            torch.randn(2, 8, 3), torch.zeros(4, 8, 3), torch.randn(8, 4), None, "silu", _starts(3, 1), None, -1,
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
    mat1, scales1 = torch.ops.quern.per_token_quant_int8_cpu(x)
    mat2, scales2 = torch.randint(-9, 9, (32, 32), dtype=torch.int8), torch.rand(32)
    calls["per_token_quant_int8_cpu"] = (x,)
    calls["int8_scaled_mm_cpu"] = mat1, mat2, scales1, scales2, None, torch.bfloat16, False
    calls["int8_scaled_mm_with_quant"] = x, mat2, scales2, None, torch.bfloat16, False
    if hasattr(torch, "float8_e4m3fn"):
        weight = torch.randn(32, 128).to(torch.float8_e4m3fn)
        mat1 = torch.randn(4, 128).bfloat16()
        calls["fp8_scaled_mm_cpu"] = mat1, weight, torch.rand(1, 1), [128, 128], None, torch.bfloat16, False
    return calls
