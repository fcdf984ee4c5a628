"""Speculative decoding by vLLM's and SGLang's names, on cases that follow their own tests."""

import unittest

import torch

import quern.sglang
import quern.torch
import quern.vllm

quern.vllm.install()
quern.sglang.install()
vllm, sglang = torch.ops._C, torch.ops.sgl_kernel


def _longs(*values):
    return torch.tensor(values, dtype=torch.int64)


def _ints(*values):
    return torch.tensor(values, dtype=torch.int32)


class RejectionTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(5)
        # Requests with 2, 0 and 3 drafts.
        self.ends, self.drafts = _longs(2, 2, 5), _longs(4, 5, 6, 7, 0)
        self.bonus = _longs(20, 21, 22).view(3, 1)
        self.out = torch.full((3, 4), -1)

    def test_greedy(self):
        vllm.rejection_greedy_sample_kernel_impl(
            self.out, self.ends, self.drafts, _longs(4, 9, 6, 7, 0), self.bonus, None, 3
        )
        self.assertEqual(self.out.tolist(), [[4, 9, -1, -1], [21, -1, -1, -1], [6, 7, 0, 22]])

    def test_greedy_leaves_requests_that_are_sampled(self):
        greedy = torch.tensor([False, True, False])
        vllm.rejection_greedy_sample_kernel_impl(
            self.out, self.ends, self.drafts, self.drafts, self.bonus, greedy, 3
        )
        self.assertEqual(self.out.tolist(), [[-1] * 4, [21, -1, -1, -1], [-1] * 4])

    def test_random_with_recovered_tokens(self):
        for draft_probs in (torch.rand(5, 8), None):
            target, inv_q = torch.rand(5, 8), torch.rand(3, 8)
            recovered = torch.empty(5, dtype=torch.int64)
            vllm.sample_recovered_tokens_kernel_impl(
                recovered, self.ends, self.drafts, draft_probs, target, inv_q, 8, draft_probs is None
            )
            weights = target.clone()
            weights[torch.arange(5), self.drafts] = 0
            if draft_probs is not None:
                weights = (target - draft_probs).clamp(min=0)
            rows = torch.tensor([0, 0, 2, 2, 2])
            self.assertEqual(recovered.tolist(), (weights * inv_q[rows]).argmax(dim=1).tolist())
            uniform = torch.rand(5)
            out = torch.full((3, 4), -1)
            vllm.rejection_random_sample_kernel_impl(
                out, self.ends, self.drafts, draft_probs, target, self.bonus, recovered, uniform, None, 3, 8,
                draft_probs is None,
            )
            for r, (begin, end) in enumerate(((0, 2), (2, 2), (2, 5))):
                want = []
                for t in range(begin, end):
                    q = 1.0 if draft_probs is None else draft_probs[t, self.drafts[t]]
                    accepted = target[t, self.drafts[t]] / q >= uniform[t]
                    want.append(int(self.drafts[t] if accepted else recovered[t]))
                    if not accepted:
                        break
                else:
                    want.append(int(self.bonus[r, 0]))
                self.assertEqual(out[r].tolist(), want + [-1] * (4 - len(want)))

    def test_a_draft_outside_the_vocabulary_is_refused(self):
        probs, drafts = torch.rand(5, 8), _longs(4, 5, 8, 7, 0)
        with self.assertRaisesRegex(ValueError, r"draft_token_ids\[2\]=8; need 0 <="):
            vllm.rejection_random_sample_kernel_impl(
                self.out, self.ends, drafts, probs, probs, self.bonus, self.drafts, torch.rand(5), None, 3, 8, False
            )
        with self.assertRaisesRegex(ValueError, "3 drafts; need at most 2"):
            vllm.rejection_greedy_sample_kernel_impl(
                self.out, self.ends, self.drafts, self.drafts, self.bonus, None, 2
            )

    def test_expand(self):
        out = torch.zeros(5, dtype=torch.int64)
        vllm.expand_kernel_impl(out, _longs(7, 8, 0), self.ends, 0, 1)
        self.assertEqual(out.tolist(), [7, 7, 1, 1, 1])


class TreeTest(unittest.TestCase):
    def test_a_tree_is_built_found_in_its_mask_and_verified(self):
        # Nodes 1 and 2 are children of the root, and 3 one of 1.
        parents, selected, lengths = _longs(-1, 0, 1).view(1, 3), _longs(0, 1, 2).view(1, 3), _longs(5)
        for mode, size in ((1, 16), (0, 36)):
            mask = torch.ones(size, dtype=torch.bool)
            positions = torch.zeros(4, dtype=torch.int64)
            index, child, sibling = torch.full((3, 1, 4), -1)
            sglang.build_tree_kernel_efficient_cpu(
                parents, selected, lengths, mask, positions, index, child, sibling, 2, 2, 4, mode
            )
            self.assertEqual(index.tolist(), [[0, 1, 2, 3]])
            self.assertEqual(child.tolist(), [[1, 3, -1, -1]])
            self.assertEqual(sibling.tolist(), [[-1, 2, -1, -1]])
            self.assertEqual(positions.tolist(), [5, 6, 6, 7])
            rows = mask.view(4, -1).int()
            self.assertTrue(bool(rows[:, :-4].all()))
            self.assertEqual(rows[:, -4:].tolist(), [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]])
            if mode == 0:
                continue
            found = torch.full((4, 4), -1)
            sglang.reconstruct_indices_from_tree_mask_cpu(
                mask, lengths, found[0], found[1], found[2], found[3], 1, 4
            )
            self.assertEqual(found.tolist(), [[5, 6, 6, 7], [0, 1, 2, 3], [1, 3, -1, -1], [-1, 2, -1, -1]])
        predicts, accepted, count = torch.full((4,), -1).int(), torch.full((1, 3), -1).int(), _ints(0)
        sglang.verify_tree_greedy_cpu(
            predicts, accepted, count, _longs(9, 7, 8, 5).view(1, 4), index, child, sibling,
            _longs(7, 5, 0, 3).view(1, 4),
        )
        self.assertEqual(predicts.tolist(), [7, 5, -1, 3])
        self.assertEqual(accepted.tolist(), [[0, 1, 3]])
        self.assertEqual(count.tolist(), [2])

    def test_other_masks_are_refused(self):
        tensors = [torch.zeros(1, 1, dtype=torch.int64)] * 2 + [_longs(0), torch.zeros(4, dtype=torch.bool)]
        tree = [torch.zeros(2, dtype=torch.int64)] + [torch.zeros(1, 2, dtype=torch.int64) for _ in range(3)]
        with self.assertRaisesRegex(ValueError, "tree_mask_mode=2; need 0"):
            sglang.build_tree_kernel_efficient_cpu(*tensors, *tree, 1, 1, 2, 2)


class SlotTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(6)
        self.pool = torch.randperm(6 * 32).int().view(6, 32)
        self.rows = _longs(4, 0, 2)

    def test_ranges_are_copied_both_ways(self):
        for dtype in (torch.int32, torch.int64):
            start, end = _longs(4, 0, 11).to(dtype), _longs(9, 0, 12).to(dtype)
            out = torch.zeros(6, dtype=torch.int64)
            sglang.assign_extend_cache_locs_cpu(self.rows, self.pool, start, end, out, 32)
            self.assertEqual(out.tolist(), self.pool[4, 4:9].tolist() + self.pool[2, 11:12].tolist())
            want = self.pool.clone()
            want[4, 4:9], want[2, 11] = torch.arange(900, 905).int(), 905
            sglang.assign_req_to_token_pool_cpu(
                self.rows.to(dtype), self.pool, start, end, torch.arange(900, 906), 32
            )
            self.assertTrue(torch.equal(self.pool, want))

    def test_drafts_are_behind_the_tokens(self):
        lengths = _longs(5, 0, 17)
        for topk, steps in ((1, 3), (2, 3), (4, 2)):
            out = torch.zeros(3 * topk * steps, dtype=torch.int64)
            sglang.assign_draft_cache_locs_contiguous_cpu(
                self.rows, self.pool, lengths.int(), out, 32, topk, steps
            )
            rows = sglang.build_draft_decode_metadata_cpu(self.pool, self.rows, lengths, topk, steps, 32)
            self.assertEqual((rows.dtype, rows.shape), (torch.int32, (3 * topk, 32)))
            for b in range(3):
                row, n = self.pool[self.rows[b]], int(lengths[b])
                drafts = row[n : n + topk * steps]
                self.assertEqual(out.view(3, -1)[b].tolist(), drafts.tolist())
                for c in range(topk):
                    want = row[:n].tolist() + drafts.view(topk, steps)[c].tolist()
                    self.assertEqual(rows[b * topk + c, : n + steps].tolist(), want)
        with self.assertRaises(Exception):
            sglang.assign_draft_cache_locs_contiguous_cpu(
                self.rows, self.pool.long(), lengths, out, 32, topk, steps
            )

    def test_accepted_tokens(self):
        tokens, lengths, bonus = torch.arange(12).int().view(3, 4), _ints(1, 4, 2), _ints(0, 0, 0)
        sglang.fill_bonus_tokens_cpu(tokens, lengths, bonus, 4)
        self.assertEqual(bonus.tolist(), [0, 7, 9])
        index = _ints(0, 1, -1, 5, -1, 3).view(2, 3)
        slots, out = torch.arange(50, 56), torch.zeros(6, dtype=torch.int64)
        sglang.fill_accept_out_cache_loc_cpu(index, slots, out)
        self.assertEqual(out.tolist(), [50, 51, 55, 53, 0, 0])
        ids = torch.arange(10, 18)
        sglang.rotate_input_ids_cpu(ids, _longs(0, 4, 5), _ints(4, 1, 3), _longs(100, 200, 300))
        self.assertEqual(ids.tolist(), [11, 12, 13, 100, 200, 16, 17, 300])
        ids = torch.arange(10, 18)
        sglang.rotate_input_ids_cpu(ids, _longs(0, 4, 5), _ints(4, 1, 3), _longs(100, 200, 300), _longs(2, 4, 7))
        self.assertEqual(ids.tolist(), [11, 12, 100, 13, 200, 16, 17, 300])


class EagleTest(unittest.TestCase):
    def test_slots(self):
        table = torch.randperm(40).int().view(4, 10)
        slots = torch.full((6,), -9)
        vllm.compute_slot_mapping_kernel_impl(_ints(0, 2, 3), _longs(0, 31, 15), table, slots, 16)
        want = [int(table[0, 0]) * 16, int(table[0, 1]) * 16 + 15, int(table[1, 0]) * 16 + 15]
        self.assertEqual(slots.tolist(), want + [-9] * 3)
        lengths, clamped = _ints(51, 99, 100, 101), torch.zeros(4, dtype=torch.int64)
        vllm.eagle_step_slot_mapping_metadata_kernel_impl(
            _longs(50, 98, 99, 100), table, lengths, clamped, slots, 16, 100, -1
        )
        self.assertEqual(clamped.tolist(), [51, 99, 0, 0])
        self.assertEqual(lengths.tolist(), [52, 100, 1, 1])
        want = [int(table[0, 3]) * 16 + 3, int(table[1, 6]) * 16 + 3]
        self.assertEqual(slots.tolist(), want + [-1] * 4)

    def test_tokens(self):
        indices, rejected = _ints(0, 0), torch.zeros(2, dtype=torch.int64)
        vllm.eagle_prepare_inputs_padded_kernel_impl(
            _longs(3, 3), _longs(2, 1), _ints(0, 4, 5), indices, rejected, 2
        )
        self.assertEqual((indices.tolist(), rejected.tolist()), ([1, 4], [2, 0]))
        following, valid = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        vllm.eagle_prepare_next_token_padded_kernel_impl(
            _longs(5, 6, -1, 1, 2, 3).view(2, 3), torch.tensor([False, True]), _longs(8, 9), following, valid, 10, 3, 2
        )
        self.assertEqual((following.tolist(), valid.tolist()), ([6, 9], [2, 0]))
        ids, positions = torch.full((2, 7), -5)
        bad, masked = torch.zeros(2, 7, dtype=torch.bool)
        added, hidden = _ints(0, 0, 0, 0), _ints(0, 0, 0, 0, 0)
        vllm.copy_and_expand_eagle_inputs_kernel_impl(
            _longs(10, 11, 12, 20, 21), _longs(0, 1, 2, 7, 8), _longs(50, 60), ids, positions, bad, masked, added,
            hidden, _ints(0, 3, 5), _ints(2, 3), 0, 99, 5, 2, True,
        )
        self.assertEqual(ids.tolist(), [11, 12, 50, 99, 60, 99, 0])
        self.assertEqual(positions.tolist(), [0, 1, 2, 3, 7, 8, 0])
        self.assertEqual(bad.int().tolist(), [0, 0, 0, 0, 0, 0, 1])
        self.assertEqual(masked.int().tolist(), [0, 0, 0, 1, 0, 1, 0])
        self.assertEqual(added.tolist(), [2, 3, 4, 5])
        self.assertEqual(hidden.tolist(), [0, 1, 2, 4, 5])


if __name__ == "__main__":
    unittest.main()
