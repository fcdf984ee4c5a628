"""Samplers: what a token depends on, and what is refused."""

import unittest

import numpy as np

import quern


class SamplerTest(unittest.TestCase):
    def test_tokens_depend_on_their_row_and_sampling_alone(self):
        rng = np.random.default_rng(1)
        logits = rng.standard_normal((5, 100), np.float32)
        sampler = quern.Sampler(100)
        self.assertEqual(sampler.sample(logits, [quern.Sampling()] * 5), logits.argmax(1).tolist())
        self.assertEqual(sampler.sample(logits, [quern.Sampling(9, top_k=1)] * 5), logits.argmax(1).tolist())
        rows = [quern.Sampling(2.0, top_k=50, top_p=0.9, seed=2**64 - 1, step=i) for i in range(5)]
        drawn = sampler.sample(logits, rows)
        self.assertEqual([sampler.sample(logits[i : i + 1], [rows[i]])[0] for i in range(5)], drawn)
        many = sampler.sample(np.repeat(logits[:1], 40, 0), [rows[0]._replace(step=i) for i in range(40)])
        self.assertGreater(len(set(many)), 10)
        self.assertLessEqual(set(many), set(np.argsort(-logits[0])[:50].tolist()))

    def test_filters_keep_what_their_header_says(self):
        logits = np.log(np.array([[0.4, 0.3, 0.2, 0.06, 0.04]], np.float32))
        sampler = quern.Sampler(5)

        def support(**filters):
            rows = [quern.Sampling(1.0, step=i, **filters) for i in range(400)]
            return set(sampler.sample(np.repeat(logits, 400, 0), rows))

        self.assertEqual(support(), {0, 1, 2, 3, 4})
        self.assertEqual(support(min_p=0.4), {0, 1, 2})
        # The entropy is 1.35: -log(p) is 0.92, 1.20, 1.61, 2.81 and 3.22.
        self.assertEqual(support(typical_p=0.25), {1})
        self.assertEqual(support(typical_p=0.45), {1, 2})
        # The standard deviation is 0.91.
        self.assertEqual(support(top_n_sigma=1.0), {0, 1, 2})

    def test_logits_are_adjusted_and_have_logprobs(self):
        def i32(*numbers):
            return np.array(numbers, np.int32)

        logits = np.array([[4, 4, -4, 1, 7]], np.float32)
        quern.ops.adjust_logits(
            logits,
            bitmask=i32([0b10111]),
            prompt_ids=i32(0, 1),
            prompt_starts=i32(0, 2),
            output_ids=i32(1, 2),
            output_counts=i32(3, 1),
            output_starts=i32(0, 2),
            repetition=np.float32([2]),
            frequency=np.float32([0.5]),
            presence=np.float32([0.25]),
        )
        self.assertEqual(logits.tolist(), [[2, 0.25, -8.75, -np.inf, 7]])
        ids, top, given, ranks = map(np.asarray, quern.ops.token_logprobs(logits, i32([1, 3]), 2))
        want = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
        self.assertEqual(ids.tolist(), [[4, 0]])
        np.testing.assert_allclose(top, [want[[4, 0]]], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(given, [want[[1, 3]]], rtol=1e-6, atol=1e-6)
        self.assertEqual(ranks.tolist(), [[3, 5]])

    def test_a_row_without_numbers_has_no_token(self):
        logits = np.zeros((2, 8), np.float32)
        logits[1] = np.nan
        self.assertEqual(quern.Sampler(8).sample(logits, [quern.Sampling()] * 2)[1], None)

    def test_refusals(self):
        sampler, row = quern.Sampler(8), np.zeros((1, 8), np.float32)
        for error, call in (
            (ValueError, lambda: quern.Sampler(0)),
            (ValueError, lambda: sampler.sample(row[:, :7], [quern.Sampling()])),
            (ValueError, lambda: sampler.sample(row, [])),
            (ValueError, lambda: sampler.sample(row, [quern.Sampling(top_p=1.5)])),
            (ValueError, lambda: sampler.sample(row, [quern.Sampling(min_p=1.5)])),
            (ValueError, lambda: sampler.sample(row, [quern.Sampling(typical_p=0)])),
            (ValueError, lambda: sampler.sample(row, [quern.Sampling(top_n_sigma=float("inf"))])),
            (ValueError, lambda: sampler.sample(row.astype(np.float16), [quern.Sampling()])),
            (TypeError, lambda: sampler.sample(row, [quern.Sampling(seed=1.5)])),
        ):
            self.assertRaises(error, call)


if __name__ == "__main__":
    unittest.main()
