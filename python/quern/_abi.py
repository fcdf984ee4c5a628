"""Structs and functions of c/quern.h and c/quern_named.h in ctypes, in the order of the headers.

tests/abi_test.py compares this file with the headers.
"""

import ctypes

ABI_VERSION = 0
# The release, of which the library must be too while ABI_VERSION is 0.
VERSION = "0.4.0-dev"

OK = 0
INVALID_ARGUMENT = 3
NOT_FOUND = 5
PERMISSION_DENIED = 7
RESOURCE_EXHAUSTED = 8
FAILED_PRECONDITION = 9
UNIMPLEMENTED = 12
INTERNAL = 13
DATA_LOSS = 15
CANCELLED = 1

CPU = 1
READ_ONLY = 1
ALIGNMENT = 64

ARGUMENT_TENSOR = 1
ARGUMENT_INT = 2
ARGUMENT_FLOAT = 3
ARGUMENT_BOOL = 4
ARGUMENT_TEXT = 5
ARGUMENT_OBJECT = 6

# Objects are plain addresses here: Python's objects own them.
_Handle = ctypes.c_void_p


class Device(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class DType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


TensorPointer = ctypes.POINTER(Tensor)


class LibraryOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("policy", ctypes.c_char_p)]


class Value(ctypes.Union):
    _fields_ = [
        ("tensor", TensorPointer),
        ("integer", ctypes.c_int64),
        ("real", ctypes.c_double),
        ("text", ctypes.c_char_p),
        ("object", ctypes.c_void_p),
    ]


class Argument(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("value", Value),
    ]


class OpOptions(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("provider", ctypes.c_char_p)]


class Operand(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("tensor", TensorPointer), ("flags", ctypes.c_uint64)]


class LinearWeightsOptions(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("format", ctypes.c_char_p),
        ("group_size", ctypes.c_int64),
        ("block_format", ctypes.c_char_p),
        ("gated", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class LinearSource(ctypes.Structure):
    _fields_ = [
        ("layout", ctypes.c_char_p),
        ("codes", TensorPointer),
        ("scales", TensorPointer),
        ("zeros", TensorPointer),
        ("g_idx", TensorPointer),
        ("bias", TensorPointer),
        ("block_n", ctypes.c_int64),
    ]


class KvCacheOptions(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("dtype", ctypes.c_char_p),
        ("form", ctypes.c_char_p),
        ("scaling", ctypes.c_char_p),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("v_head_dim", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("num_pages", ctypes.c_int64),
        ("num_layers", ctypes.c_int64),
    ]


class ScheduleOptions(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("q_heads", ctypes.c_int64),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("max_sequences", ctypes.c_int64),
        ("max_kv_len", ctypes.c_int64),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("num_sequences", ctypes.c_int64),
        ("q_lens", ctypes.POINTER(ctypes.c_int64)),
        ("kv_lens", ctypes.POINTER(ctypes.c_int64)),
        ("pages", ctypes.POINTER(ctypes.c_int32)),
        ("pages_stride", ctypes.c_int64),
        ("slots", ctypes.POINTER(ctypes.c_int64)),
        ("num_slots", ctypes.c_int64),
        ("workers", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class RotaryScalingOptions(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("kind", ctypes.c_char_p),
        ("factor", ctypes.c_double),
        ("original", ctypes.c_int64),
        ("target", ctypes.c_int64),
        ("low_freq", ctypes.c_double),
        ("high_freq", ctypes.c_double),
        ("beta_fast", ctypes.c_double),
        ("beta_slow", ctypes.c_double),
        ("attention_factor", ctypes.c_double),
        ("mscale", ctypes.c_double),
        ("mscale_all_dim", ctypes.c_double),
        ("short_factors", ctypes.POINTER(ctypes.c_double)),
        ("long_factors", ctypes.POINTER(ctypes.c_double)),
        ("num_factors", ctypes.c_int64),
        ("untruncated", ctypes.c_int32),
    ]


# The struct of each name in the header that Python passes.
STRUCTS = {
    "quern_device": Device,
    "quern_dtype": DType,
    "quern_tensor": Tensor,
    "quern_library_options": LibraryOptions,
    "quern_argument": Argument,
    "quern_op_options": OpOptions,
    "quern_operand": Operand,
    "quern_linear_weights_options": LinearWeightsOptions,
    "quern_linear_source": LinearSource,
    "quern_rotary_scaling_options": RotaryScalingOptions,
    "quern_kv_cache_options": KvCacheOptions,
    "quern_schedule_options": ScheduleOptions,
    "quern_step": Step,
}

_STATUS = ctypes.c_int32
_SIZE = ctypes.c_size_t
_OUT = ctypes.POINTER(_Handle)

# Each function's result, then its parameters. Operands and workspaces are
# addresses, because a call that builds no pointer objects is faster.
FUNCTIONS = {
    "quern_abi_version": (ctypes.c_int32,),
    "quern_version": (ctypes.c_char_p,),
    "quern_message": (_SIZE, _Handle, ctypes.c_char_p, _SIZE),
    "quern_explain": (_SIZE, _Handle, ctypes.c_char_p, _SIZE),
    "quern_destroy": (_STATUS, _Handle),
    "quern_library_create": (
        _STATUS, ctypes.POINTER(LibraryOptions), _OUT, ctypes.c_char_p, _SIZE,
    ),
    "quern_set_max_isa": (_STATUS, ctypes.c_char_p, ctypes.c_char_p, _SIZE),
    "quern_ops": (_SIZE, _Handle, ctypes.c_char_p, _SIZE),
    "quern_op_doc": (_SIZE, _Handle, ctypes.c_char_p, ctypes.c_char_p, _SIZE),
    "quern_executor_create_pool": (_STATUS, _Handle, ctypes.c_int32, _OUT),
    "quern_op_create": (
        _STATUS, _Handle, ctypes.c_char_p, ctypes.POINTER(OpOptions), ctypes.POINTER(Argument),
        _SIZE, _OUT,
    ),
    "quern_op_returned": (_STATUS, _Handle, _SIZE, TensorPointer),
    "quern_op_prepare": (_STATUS, _Handle, ctypes.c_void_p, _SIZE, _Handle),
    "quern_op_rows": (_STATUS, _Handle, ctypes.c_void_p, _SIZE, ctypes.POINTER(ctypes.c_int64)),
    "quern_op_workspace_bytes": (
        _STATUS, _Handle, ctypes.c_int64, _Handle, ctypes.POINTER(ctypes.c_int64),
    ),
    "quern_op_execute": (
        _STATUS, _Handle, ctypes.c_void_p, _SIZE, ctypes.c_void_p, _SIZE, _Handle,
    ),
    "quern_linear_weights_pack": (
        _STATUS, _Handle, ctypes.POINTER(LinearWeightsOptions), ctypes.POINTER(LinearSource),
        _SIZE, _SIZE, _Handle, _OUT,
    ),
    "quern_linear_weights_bytes": (
        _STATUS, _Handle, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(_SIZE),
    ),
    "quern_linear_weights_adopt": (_STATUS, _Handle, ctypes.c_void_p, _SIZE, _OUT),
    "quern_rotary_scaling_create": (_STATUS, _Handle, ctypes.POINTER(RotaryScalingOptions), _OUT),
    "quern_kv_cache_create": (_STATUS, _Handle, ctypes.POINTER(KvCacheOptions), _OUT),
    "quern_kv_cache_pages": (_STATUS, _Handle, ctypes.c_int64, TensorPointer),
    "quern_schedule_create": (_STATUS, _Handle, _Handle, ctypes.POINTER(ScheduleOptions), _OUT),
    "quern_schedule_build": (_STATUS, _Handle, ctypes.POINTER(Step)),
    "quern_onednn_handler_create": (_STATUS, _Handle, _OUT),
    "quern_scheduler_metadata_create": (_STATUS, _Handle, _OUT),
    "quern_expert_weights_create": (
        _STATUS, _Handle, ctypes.POINTER(_Handle), ctypes.POINTER(_Handle), _SIZE, _OUT,
    ),
}

# Functions of the header that Python does not call. Its own threads would wait
# for the interpreter's lock, so it has no executor of functions.
NOT_CALLED = ("quern_executor_create_from",)


def declare(library, functions):
    """Gives the functions of a ctypes.CDLL their types."""
    for name, (result, *parameters) in functions.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = parameters
