"""Structs and functions of c/quern_model.h in ctypes, as _abi.py has those of c/quern.h."""

import ctypes

from ._abi import _OUT, _SIZE, _STATUS, TensorPointer, _Handle

ENCODE_SPECIALS = 1
ENCODE_BOS = 2
DECODE_CONTINUES = 1
NO_TOKEN = -1

# void (*progress)(void* progress_context, int64_t done, int64_t total)
Progress = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


# int32_t (*cancelled)(void* cancelled_context)
Cancelled = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)


class ModelOptions(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("path", ctypes.c_char_p),
        ("bytes", ctypes.c_void_p),
        ("num_bytes", ctypes.c_size_t),
        ("weights", ctypes.c_char_p),
        ("activations", ctypes.c_char_p),
        ("max_context", ctypes.c_int64),
        ("max_bytes", ctypes.c_int64),
        ("packed_path", ctypes.c_char_p),
        ("progress", Progress),
        ("progress_context", ctypes.c_void_p),
        ("cancelled", Cancelled),
        ("cancelled_context", ctypes.c_void_p),
    ]


class ModelInfo(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("context", ctypes.c_int64),
        ("vocab", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("layers", ctypes.c_int64),
        ("weight_bytes", ctypes.c_int64),
        ("step_tokens", ctypes.c_int64),
    ]


class ModelStateOptions(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("max_sequences", ctypes.c_int64),
        ("max_step_tokens", ctypes.c_int64),
        ("cache_tokens", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("cache_dtype", ctypes.c_char_p),
        ("max_bytes", ctypes.c_int64),
    ]


class ModelStateInfo(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("cache_bytes", ctypes.c_int64),
        ("cache_bytes_per_token", ctypes.c_int64),
        ("free_tokens", ctypes.c_int64),
        ("scratch_bytes", ctypes.c_int64),
    ]


class ModelItem(ctypes.Structure):
    _fields_ = [
        ("sequence", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("tokens", ctypes.POINTER(ctypes.c_int32)),
        ("num_tokens", ctypes.c_int64),
    ]


class ModelStep(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("items", ctypes.POINTER(ModelItem)),
        ("num_items", ctypes.c_size_t),
        ("all_logits", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class TokenizerOptions(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("path", ctypes.c_char_p),
        ("bytes", ctypes.c_void_p),
        ("num_bytes", ctypes.c_size_t),
    ]


class TokenizerInfo(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("vocab", ctypes.c_int32),
        ("bos", ctypes.c_int32),
        ("eos", ctypes.c_int32),
        ("adds_bos", ctypes.c_int32),
    ]


class Sampling(ctypes.Structure):
    _fields_ = [
        ("temperature", ctypes.c_float),
        ("top_p", ctypes.c_float),
        ("top_k", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
    ]


class SamplingFilters(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("min_p", ctypes.c_float),
        ("top_n_sigma", ctypes.c_float),
        ("typical_p", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    ]


STRUCTS = {
    "quern_model_options": ModelOptions,
    "quern_model_info": ModelInfo,
    "quern_model_state_options": ModelStateOptions,
    "quern_model_state_info": ModelStateInfo,
    "quern_model_item": ModelItem,
    "quern_model_step": ModelStep,
    "quern_tokenizer_options": TokenizerOptions,
    "quern_tokenizer_info": TokenizerInfo,
    "quern_sampling": Sampling,
    "quern_sampling_filters": SamplingFilters,
}

_INT32S = ctypes.POINTER(ctypes.c_int32)

FUNCTIONS = {
    "quern_model_create": (_STATUS, _Handle, ctypes.POINTER(ModelOptions), _Handle, _OUT),
    "quern_model_get_info": (_STATUS, _Handle, ctypes.POINTER(ModelInfo)),
    "quern_model_state_create": (_STATUS, _Handle, _Handle, ctypes.POINTER(ModelStateOptions), _OUT),
    "quern_model_state_get_info": (_STATUS, _Handle, ctypes.POINTER(ModelStateInfo)),
    "quern_model_state_begin": (_STATUS, _Handle, _INT32S),
    "quern_model_state_fork": (_STATUS, _Handle, ctypes.c_int32, _INT32S),
    "quern_model_state_end": (_STATUS, _Handle, ctypes.c_int32),
    "quern_model_state_length": (_STATUS, _Handle, ctypes.c_int32, ctypes.POINTER(ctypes.c_int64)),
    "quern_model_state_forward": (_STATUS, _Handle, ctypes.POINTER(ModelStep), _Handle, TensorPointer),
    "quern_tokenizer_create": (_STATUS, _Handle, ctypes.POINTER(TokenizerOptions), _OUT),
    "quern_tokenizer_get_info": (_STATUS, _Handle, ctypes.POINTER(TokenizerInfo)),
    "quern_tokenizer_is_end": (_STATUS, _Handle, ctypes.c_int32, _INT32S),
    "quern_tokenizer_encode": (
        _STATUS, _Handle, ctypes.c_char_p, _SIZE, ctypes.c_uint64, _INT32S, _SIZE, ctypes.POINTER(_SIZE),
    ),
    "quern_tokenizer_decode": (
        _STATUS, _Handle, _INT32S, _SIZE, ctypes.c_uint64, ctypes.c_char_p, _SIZE, ctypes.POINTER(_SIZE),
    ),
    "quern_sampler_create": (_STATUS, _Handle, ctypes.c_int64, _OUT),
    "quern_sampler_sample": (
        _STATUS, _Handle, TensorPointer, ctypes.POINTER(Sampling), _SIZE, _INT32S, _Handle,
    ),
    "quern_sampler_sample_filtered": (
        _STATUS, _Handle, TensorPointer, ctypes.POINTER(Sampling), ctypes.POINTER(SamplingFilters), _SIZE, _INT32S,
        _Handle,
    ),
}
