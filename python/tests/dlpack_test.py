"""DLPack in and out, and the dtypes that NumPy lacks."""

import ctypes
import gc
import unittest
import weakref

import numpy as np

import quern
from quern import _abi, _dlpack, ops


class Framework:
    """A tensor of a framework: has __dlpack__ and nothing else of what quern knows."""

    def __init__(self, tensor, versioned=True, device=1):
        self.tensor, self.versioned, self.device = tensor, versioned, device

    def __dlpack__(self, **arguments):
        if not self.versioned:
            if arguments:
                raise TypeError("__dlpack__() got an unexpected keyword argument")
            return self.tensor.__dlpack__()
        return self.tensor.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return (self.device, 0)


def bf16_bits(x):
    """The bits of x as bf16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class ImportTest(unittest.TestCase):
    def setUp(self):
        self.x = np.random.default_rng(3).standard_normal((4, 16), np.float32)

    def test_results_are_those_of_numpy(self):
        for versioned in (True, False):
            x = Framework(quern.from_dlpack(self.x), versioned)
            y = ops.rms_norm(x)
            self.assertIs(type(y), quern.Tensor)
            np.testing.assert_array_equal(y.numpy(), ops.rms_norm(self.x))

    def test_memory_is_shared_both_ways(self):
        x = Framework(quern.from_dlpack(self.x))
        out = np.zeros_like(self.x)
        ops.silu(x, out=Framework(quern.from_dlpack(out)))
        np.testing.assert_array_equal(out, ops.silu(self.x))
        # NumPy 1 takes DLPack as read-only.
        back = np.from_dlpack(quern.from_dlpack(self.x))
        quern.from_dlpack(self.x).numpy()[0, 0] = 77
        self.assertEqual((self.x[0, 0], back[0, 0]), (77, 77))

    def test_strides_are_kept(self):
        x = self.x[:, 3:11]
        tensor = quern.from_dlpack(Framework(quern.from_dlpack(x)))
        self.assertEqual((tensor.shape, tensor.strides), ((4, 8), (16, 1)))
        np.testing.assert_array_equal(tensor.numpy(), x)
        np.testing.assert_array_equal(ops.silu(tensor).numpy(), ops.silu(x))

    def test_read_only_memory_is_not_written(self):
        frozen = np.zeros((4, 16), np.float32)
        frozen.flags.writeable = False
        x = quern.from_dlpack(Framework(quern.from_dlpack(frozen)))
        self.assertTrue(x.read_only)
        ops.silu(x)
        for out in (x, Framework(quern.from_dlpack(frozen))):
            self.assertRaisesRegex(ValueError, "out is read-only", ops.silu, self.x, out=out)
        # A consumer of before DLPack 1.0 cannot be told.
        self.assertRaisesRegex(BufferError, "read-only", x.__dlpack__)
        self.assertFalse(x.numpy().flags.writeable)

    def test_other_devices_and_versions_are_refused(self):
        x = quern.from_dlpack(self.x)
        self.assertRaisesRegex(ValueError, "x has device_type=2; need 1, the CPU", ops.silu, Framework(x, device=2))

        class Strange:
            def __init__(self, capsule):
                self.capsule = capsule

            def __dlpack__(self, **_):
                return self.capsule

        self.assertRaisesRegex(TypeError, "need a capsule", ops.silu, Strange(5))
        capsule = x.__dlpack__(max_version=(1, 0))
        address = _dlpack._pointer(capsule, b"dltensor_versioned")
        ctypes.c_uint32.from_address(address).value = 2
        self.assertRaisesRegex(ValueError, "DLPack version 2", ops.silu, Strange(capsule))

    def test_dtypes_that_the_library_lacks_are_named(self):
        x = Framework(quern.Tensor(quern._tensor.Meta(2, 64, 1, (2,), None), 0, None))
        with self.assertRaisesRegex(NotImplementedError, "DLPack type code 2, 64 bits"):
            ops.silu(x)
        self.assertRaisesRegex(TypeError, "type code 2, 64 bits, 1 lanes; need one of f32", quern.from_dlpack, x)


class ExportTest(unittest.TestCase):
    def test_what_is_lent_is_freed_when_the_consumer_is_done(self):
        before = len(_dlpack._lent)
        for arguments in ({}, {"max_version": (1, 0)}):
            tensor = quern.empty((3,), "f32")
            seen = weakref.ref(tensor)
            capsule = tensor.__dlpack__(**arguments)
            del tensor
            gc.collect()
            self.assertIsNotNone(seen())
            del capsule
            gc.collect()
            self.assertIsNone(seen())
        array = np.from_dlpack(quern.empty((3,), "f32"))
        self.assertEqual(len(_dlpack._lent), before + 1)
        del array
        gc.collect()
        self.assertEqual(len(_dlpack._lent), before)

    def test_a_copy_is_another_tensor(self):
        tensor = quern.from_dlpack(np.arange(6, dtype=np.float32).reshape(2, 3)[:, 1:])
        capsule = tensor.__dlpack__(max_version=(1, 1), copy=True)
        managed = _dlpack._Versioned.from_address(_dlpack._pointer(capsule, b"dltensor_versioned"))
        self.assertEqual(managed.flags, _dlpack._COPIED)
        self.assertNotEqual(managed.tensor.data, tensor._address)
        values = (ctypes.c_float * 4).from_address(managed.tensor.data)
        self.assertEqual(list(values), [1, 2, 4, 5])

    def test_other_devices_and_streams_are_refused(self):
        tensor = quern.empty((1,), "u8")
        self.assertEqual(tensor.__dlpack_device__(), (_abi.CPU, 0))
        self.assertRaises(BufferError, tensor.__dlpack__, dl_device=(2, 0))
        self.assertRaises(BufferError, tensor.__dlpack__, stream=1)


class DtypeTest(unittest.TestCase):
    def test_bf16_in_and_out(self):
        x = np.random.default_rng(5).standard_normal((3, 32), np.float32)
        y = ops.convert(x, "bf16")
        self.assertEqual((y.dtype, y.shape), ("bf16", (3, 32)))
        np.testing.assert_array_equal(y.bits(), bf16_bits(x))
        z = ops.rms_norm(quern.view(bf16_bits(x), "bf16"))
        exact = (y.bits().astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(z.bits(), bf16_bits(ops.rms_norm(exact)))
        np.testing.assert_array_equal(ops.convert(y, "f32").numpy(), exact)

    def test_a_view_shares_memory_and_its_protection(self):
        bits = np.zeros(4, np.uint16)
        tensor = quern.view(bits, "bf16")
        tensor.bits()[1] = 0x3F80
        self.assertEqual(bits[1], 0x3F80)
        bits.flags.writeable = False
        self.assertTrue(quern.view(bits, "bf16").read_only)
        self.assertEqual(quern.view(np.zeros(3, np.uint8), "f8e4m3").dtype, "f8e4m3")
        self.assertEqual(quern.view(tensor, "f16").dtype, "f16")
        self.assertRaisesRegex(ValueError, "elements of 8 bits; need 16", quern.view, np.zeros(2, np.int8), "bf16")
        self.assertRaisesRegex(ValueError, "dtype='float'; need one of f32", quern.view, bits, "float")
        # Bytes in the other order would be other numbers.
        swapped = np.zeros(4, np.dtype(np.uint16).newbyteorder())
        self.assertRaisesRegex(TypeError, "this machine's order of bytes", quern.view, swapped, "bf16")

    def test_fp8_from_an_operator(self):
        codes, scales = ops.quant_fp8(np.array([[1, -2, 448, 0.5]] * 2, np.float32))
        self.assertEqual((codes.dtype, codes.shape), ("f8e4m3", (2, 4)))
        self.assertIs(type(scales), np.ndarray)
        # Scaled by 1, e4m3 has 1 = 0x38, -2 = 0xc0, 448 = 0x7e, 0.5 = 0x30.
        np.testing.assert_array_equal(scales.ravel(), [1, 1])
        np.testing.assert_array_equal(codes.bits(), [[0x38, 0xC0, 0x7E, 0x30]] * 2)

    def test_ml_dtypes_where_it_is(self):
        try:
            import ml_dtypes
        except ImportError:
            tensor = quern.empty((2,), "bf16")
            self.assertRaisesRegex(TypeError, "without the package ml_dtypes", tensor.numpy)
            self.assertRaisesRegex(TypeError, "without the package ml_dtypes", np.asarray, tensor)
            return
        x = np.arange(8).astype(ml_dtypes.bfloat16).reshape(1, 8)
        y = ops.silu(x)
        self.assertEqual(y.dtype, x.dtype)
        np.testing.assert_array_equal(y.view(np.uint16), ops.silu(quern.view(x.view(np.uint16), "bf16")).bits())
        self.assertEqual(quern.empty((2,), "f8e5m2").numpy().dtype, ml_dtypes.float8_e5m2)

    def test_numpy_takes_tensors_of_its_dtypes(self):
        tensor = quern.view(np.array([1, 2], np.float32), "f32")
        np.testing.assert_array_equal(np.asarray(tensor), [1, 2])
        np.testing.assert_array_equal(np.asarray(tensor, dtype=np.float64), [1, 2])
        self.assertEqual((len(tensor), repr(tensor)), (2, "<quern.Tensor f32[2]>"))
        self.assertRaisesRegex(ValueError, "extents of 0 or more", quern.empty, (2, -1), "f32")
        for wrong in (2.5, True, "2"):
            self.assertRaisesRegex(TypeError, "need whole numbers", quern.empty, (wrong,), "f32")
        scalar = quern.from_dlpack(Framework(np.ones((), np.float32)))
        self.assertEqual((scalar.shape, scalar.numpy()), ((), 1))
        self.assertRaisesRegex(TypeError, "without dimensions", len, scalar)


if __name__ == "__main__":
    unittest.main()
