"""Attention over a paged cache, against plain loops in double."""

import gc
import unittest
import weakref

import numpy as np

import quern
from quern import _call, _tensor, ops

_KV_HEADS, _Q_HEADS, _DIM, _PAGE = 2, 4, 16, 16


def reference(q, k, v, q_len, window=None):
    """One sequence: q[q_len, ..] are its last tokens."""
    out = np.zeros(q.shape)
    first = len(k) - q_len
    for i in range(q_len):
        p = first + i
        low = 0 if window is None else max(0, p - window)
        for h in range(_Q_HEADS):
            g = h // (_Q_HEADS // _KV_HEADS)
            x = k[low : p + 1, g].astype(np.float64) @ q[i, h] / np.sqrt(_DIM)
            e = np.exp(x - x.max())
            out[i, h] = (e / e.sum()) @ v[low : p + 1, g]
    return out


class AttentionTest(unittest.TestCase):
    def setUp(self):
        self.rng = np.random.default_rng(13)
        self.cache = quern.KvCache(8, _PAGE, _KV_HEADS, _DIM, num_layers=2, dtype="f32")
        self.schedule = self.cache.schedule(_Q_HEADS)

    def heads(self, tokens, heads):
        return self.rng.standard_normal((tokens, heads, _DIM), np.float32)

    def test_a_prompt_and_then_one_token_at_a_time(self):
        lens, pages = [3, 20], [[5], [1, 2]]
        k, v = [self.heads(n + 2, _KV_HEADS) for n in lens], [self.heads(n + 2, _KV_HEADS) for n in lens]
        for step in range(3):
            q_lens = lens if step == 0 else [1, 1]
            kv_lens = [n + step for n in lens]
            new = [slice(kv - q, kv) for q, kv in zip(q_lens, kv_lens)]
            q = [self.heads(n, _Q_HEADS) for n in q_lens]
            self.schedule.build(q_lens, kv_lens, pages)
            for layer in (1, 0):
                out = quern.attention(
                    np.concatenate(q),
                    self.cache,
                    self.schedule,
                    key=np.concatenate([x[s] for x, s in zip(k, new)]),
                    value=np.concatenate([x[s] for x, s in zip(v, new)]),
                    layer=layer,
                )
                want = [reference(a, b[:n], c[:n], m) for a, b, c, n, m in zip(q, k, v, kv_lens, q_lens)]
                # Sums of at most 22 products of numbers below 6, in f32.
                np.testing.assert_allclose(out, np.concatenate(want), atol=22 * 36 * 2.0**-23, rtol=0)

    def test_layers_and_sequences_do_not_touch_each_other(self):
        q, k = self.heads(2, _Q_HEADS), self.heads(2, _KV_HEADS)
        self.cache.pages(0).numpy()[:] = 0
        self.cache.pages(1).numpy()[:] = 0x55
        self.schedule.build([2], [2], np.array([[3]]))
        np.testing.assert_array_equal(self.schedule.slots.numpy(), [48, 49])
        quern.attention(q, self.cache, self.schedule, key=k, value=k)
        self.assertTrue((self.cache.pages(1).numpy() == 0x55).all())
        pages = self.cache.pages(0).numpy()
        self.assertTrue(pages[3].any())
        self.assertFalse(np.delete(pages, 3, 0).any())

    def test_a_window_ends_what_is_seen(self):
        schedule = self.cache.schedule(_Q_HEADS, window_left=4)
        q, k, v = self.heads(12, _Q_HEADS), self.heads(12, _KV_HEADS), self.heads(12, _KV_HEADS)
        schedule.build([12], [12], [[0]])
        out = quern.attention(q, self.cache, schedule, key=k, value=v)
        np.testing.assert_allclose(out, reference(q, k, v, 12, window=4), atol=1e-5)

    def test_bits_do_not_depend_on_workers(self):
        q, k = self.heads(40, _Q_HEADS), self.heads(40, _KV_HEADS)
        with quern.Executor(2) as executor:
            self.schedule.build([40], [40], [[0, 1, 2]], executor=executor)
            two = quern.attention(q, self.cache, self.schedule, key=k, value=k, executor=executor)
        self.schedule.build([40], [40], [[0, 1, 2]])
        np.testing.assert_array_equal(quern.attention(q, self.cache, self.schedule, key=k, value=k), two)

    def test_operators_by_name_are_the_same_call(self):
        q, k, v = self.heads(3, _Q_HEADS), self.heads(3, _KV_HEADS), self.heads(3, _KV_HEADS)
        self.schedule.build([3], [3], [[7]])
        ops.write_kv(k, v, self.schedule.slots, self.cache.pages(0), self.cache)
        out = ops.paged_attention(q, self.cache.pages(0), layout=self.cache, step=self.schedule)
        np.testing.assert_array_equal(out, quern.attention(q, self.cache, self.schedule))

    def test_a_cascade_over_a_shared_prefix_is_attention_over_all(self):
        # Two sequences of 32 shared keys in pages 0 and 1, and of 5 and 11 own ones in pages 4 and 6.
        prefix, own = 2 * _PAGE, (5, 11)
        for pages, count in (([0, 1], prefix), ([4], own[0]), ([6], own[1])):
            keys, values = self.heads(count, _KV_HEADS), self.heads(count, _KV_HEADS)
            self.schedule.build([count], [count], [pages])
            quern.attention(self.heads(count, _Q_HEADS), self.cache, self.schedule, key=keys, value=values)
        q = self.heads(2, _Q_HEADS)

        def run(kv_lens, pages):
            self.schedule.build([1, 1], kv_lens, pages)
            lse = np.full((2, _Q_HEADS), np.nan, np.float32)
            return quern.attention(q, self.cache, self.schedule, lse=lse), lse

        want, want_lse = run([prefix + n for n in own], [[0, 1, 4], [0, 1, 6]])
        np.testing.assert_array_equal(quern.attention(q, self.cache, self.schedule), want)
        parts = run([prefix] * 2, [[0, 1], [0, 1]]) + run(own, [[4], [6]])
        out, lse = ops.merge_states(*parts)
        np.testing.assert_allclose(out, want, atol=2e-6)
        np.testing.assert_allclose(lse, want_lse, atol=2e-6)
        self.assertGreater(np.abs(out - parts[0]).max(), 0.01)
        # A part without keys changes nothing, whatever its output holds.
        none = np.full_like(want, np.nan), np.full_like(lse, -np.inf)
        for merged in (ops.merge_states(*none, want, want_lse), ops.merge_states(want, want_lse, *none)):
            np.testing.assert_array_equal(merged[0], want)
            np.testing.assert_array_equal(merged[1], want_lse)
        nothing = ops.merge_states(*none, *none)
        self.assertFalse(nothing[0].any())
        self.assertTrue(np.isneginf(nothing[1]).all())
        with self.assertRaisesRegex(ValueError, "merge_states: suffix_lse is"):
            ops.merge_states(*parts[:3], lse[:1])

    def test_objects_are_freed_with_their_last_references(self):
        cache = quern.KvCache(1, _PAGE, _KV_HEADS, _DIM)
        schedule = cache.schedule(_Q_HEADS)
        schedule.build([1], [1], [[0]])
        quern.attention(self.heads(1, _Q_HEADS), cache, schedule)
        pages, seen = cache.pages(), weakref.ref(cache)
        del cache, schedule
        gc.collect()
        self.assertIsNotNone(seen())  # pages are its memory
        del pages
        gc.collect()
        self.assertIsNone(seen())

    def test_a_workspace_lives_until_its_call_is_done(self):
        # A finalizer or a handler of a signal may call an operator, with a larger
        # workspace, while a call is about to execute.
        function = _call.function_of(quern.library(), "paged_attention")
        q, k = self.heads(40, _Q_HEADS), self.heads(40, _KV_HEADS)
        execute, alive = function.execute, []

        def interrupted(*arguments):
            memory = weakref.ref(_tensor._scratch.memory._bytes)
            _tensor.scratch(2 * _tensor._scratch.size + 64)
            alive.append(memory() is not None)
            return execute(*arguments)

        self.schedule.build([40], [40], [[0, 1, 2]])
        want = quern.attention(q, self.cache, self.schedule, key=k, value=k)
        function.execute = interrupted
        try:
            np.testing.assert_array_equal(quern.attention(q, self.cache, self.schedule), want)
        finally:
            function.execute = execute
        self.assertEqual(alive, [True])

    def test_a_workspace_for_which_there_is_no_memory_is_asked_for_again(self):
        new = _tensor._Memory

        def refuse(size):
            raise MemoryError

        _tensor._Memory = refuse
        try:
            self.assertRaises(MemoryError, _tensor.scratch, _tensor._scratch.size + 64)
        finally:
            _tensor._Memory = new
        self.assertGreater(_tensor.scratch(64).address, 0)

    def test_a_step_that_is_refused_for_a_call_leaves_the_slots(self):
        self.schedule.build([2], [2], [[3]])
        build = self.schedule._library._c.quern_schedule_build
        self.schedule._library._c.quern_schedule_build = lambda *_: quern.FailedPreconditionError.status
        try:
            self.assertRaises(quern.FailedPreconditionError, self.schedule.build, [1], [3], [[3]])
        finally:
            self.schedule._library._c.quern_schedule_build = build
        np.testing.assert_array_equal(self.schedule.slots.numpy(), [48, 49])

    def test_refusals(self):
        q, k = self.heads(2, _Q_HEADS), self.heads(2, _KV_HEADS)
        build, attention = self.schedule.build, quern.attention
        fresh = self.cache.schedule(_Q_HEADS)
        other = quern.KvCache(1, _PAGE, _KV_HEADS, _DIM)
        build([2], [2], [[0]])
        cases = [
            (ValueError, "has no step; need Schedule.build", lambda: attention(q, self.cache, fresh, key=k, value=k)),
            (ValueError, "only one of key and value", lambda: attention(q, self.cache, self.schedule, key=k)),
            (ValueError, "of another cache", lambda: attention(q, other, self.schedule)),
            (TypeError, "need a quern.KvCache", lambda: attention(q, q, self.schedule)),
            (IndexError, "layer=2; need 0 to 1", lambda: attention(q, self.cache, self.schedule, layer=2)),
            (ValueError, "", lambda: attention(q[:1], self.cache, self.schedule)),
            (ValueError, "1, 1 and 2 sequences", lambda: build([2], [2], [[0], [1]])),
            (ValueError, "has 1 pages; need 2", lambda: build([2], [17], [[0]])),
            (ValueError, "", lambda: build([2], [2], [[8]])),
            (ValueError, "", lambda: build([-2], [2], [[0]])),
            (TypeError, "need whole numbers", lambda: build([1.5], [2], [[0]])),
            (OverflowError, "below 2", lambda: build([1], [2], [[2**31]])),
            (ValueError, "kv_heads", lambda: quern.KvCache(1, 16, 0, 16)),
            (OverflowError, "need 64 bits", lambda: quern.KvCache(2**64 + 1, 16, 1, 16)),
            (TypeError, "page_size=1.5 is of type float", lambda: quern.KvCache(1, 1.5, 1, 16)),
            (TypeError, "dtype=5 is of type int; need a text", lambda: quern.KvCache(1, 16, 1, 16, dtype=5)),
            (OverflowError, "window_left", lambda: self.cache.schedule(_Q_HEADS, window_left=2**63)),
            (ValueError, "f7", lambda: quern.KvCache(1, 16, 1, 16, dtype="f7")),
        ]
        for error, words, call in cases:
            with self.subTest(words):
                self.assertRaisesRegex(error, words, call)
        build([2], [2], [[0]])
        self.assertRaises(ValueError, build, [2], [2], [[8]])
        self.assertRaisesRegex(ValueError, "has no step", lambda: self.schedule.slots)


if __name__ == "__main__":
    unittest.main()
