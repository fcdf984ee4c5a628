#ifndef QUERN_OPS_MLA_MLA_TESTUTIL_H_
#define QUERN_OPS_MLA_MLA_TESTUTIL_H_

// A layer of multi-head latent attention for tests: weights, sequences that
// grow step by step in a cache full of poison, and the verdict of the oracle on
// every token that was computed.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/attention/schedule_bound.h"
#include "quern/cache/kv_cache_view.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/page_table.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/math_util.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/mixer/bounded_testutil.h"
#include "quern/ops/mla/mla.h"
#include "quern/ops/mla/mla_schedule.h"
#include "quern/ops/mla/mla_spec.h"
#include "quern/ops/mla/mla_weights.h"
#include "quern/ops/mla/reference_mla_testutil.h"
#include "quern/ops/rope/rotary_embedding.h"
#include "quern/ops/rope/rotary_spec.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/errors/rounding_error.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/no_alloc.h"

namespace quern {

// Small and odd sizes. In bf16 and f16 the cache has the same type.
inline MlaSpec SmallMla(DType dtype, int64_t q_lora) {
  MlaSpec spec;
  spec.hidden = 22;
  spec.heads = 3;
  spec.q_lora = q_lora;
  spec.kv_lora = 20;
  spec.nope = 11;
  spec.rope = 6;
  spec.v_head_dim = 9;
  spec.dtype = spec.norm_dtype = dtype;
  KvLayoutSpec layout;
  layout.dtype = dtype;
  layout.kv_heads = 1;
  layout.head_dim = spec.latent_row();
  layout.v_head_dim = spec.kv_lora;
  layout.page_size = 16;
  layout.form = KvForm::kLatent;
  spec.cache = KvLayout::Create(layout).value();
  return spec;
}

// Matrices of a spec: packed, and as the oracle has them. Rows are as long as
// their inputs are large.
struct TestMlaWeights {
  TestMlaWeights(const MlaSpec& spec, Rng& rng) {
    if (spec.q_lora > 0) {
      packed.q_a = Pack(spec.dtype, spec.q_lora, spec.hidden, rng, values.q_a);
    }
    packed.q = Pack(spec.dtype, spec.heads * spec.head_dim(),
                    spec.q_lora > 0 ? spec.q_lora : spec.hidden, rng, values.q);
    packed.kv_a =
        Pack(spec.dtype, spec.latent_row(), spec.hidden, rng, values.kv_a);
    packed.out = Pack(spec.dtype, spec.hidden, spec.heads * spec.v_head_dim,
                      rng, values.out);
    const int64_t kv_b_rows = spec.heads * (spec.nope + spec.v_head_dim);
    const AnyMatrix kv_b(spec.dtype, Matrix(kv_b_rows, spec.kv_lora, rng),
                         kv_b_rows, spec.kv_lora, spec.kv_lora + 1);
    values.kv_b = kv_b.doubles();
    InlineExecutor executor;
    EXPECT_EQ(PackKvB(spec, kv_b.const_view(), executor, packed),
              absl::OkStatus());
    kv_norm = std::make_unique<AnyMatrix>(
        spec.norm_dtype, ToDoubles(UniformReals(rng, spec.kv_lora, 0.5, 1.5)),
        1, spec.kv_lora, spec.kv_lora);
    values.kv_norm = kv_norm->doubles();
    if (spec.q_lora == 0) return;
    q_norm = std::make_unique<AnyMatrix>(
        spec.norm_dtype, ToDoubles(UniformReals(rng, spec.q_lora, 0.5, 1.5)), 1,
        spec.q_lora, spec.q_lora);
    values.q_norm = q_norm->doubles();
  }

  ReferenceMlaWeights values;
  MlaWeights packed;
  std::unique_ptr<AnyMatrix> q_norm, kv_norm;

 private:
  static std::vector<double> Matrix(int64_t n, int64_t k, Rng& rng) {
    const double size = std::sqrt(3.0 / static_cast<double>(k));
    return ToDoubles(UniformReals(rng, n * k, -size, size));
  }
  static LinearWeights Pack(DType dtype, int64_t n, int64_t k, Rng& rng,
                            std::vector<double>& values) {
    KnownWeights known = FloatWeights(dtype, n, k, Matrix(n, k, rng));
    known.padding = 1;
    values = known.codes;
    InlineExecutor executor;
    return known.Pack(executor);
  }
};

// New tokens of a sequence.
struct MlaPart {
  size_t sequence;
  int64_t tokens;
};

// Sequences of random tokens in one cache. Outputs are kept as they are
// computed.
class MlaSequences {
 public:
  static constexpr int64_t kMaxPositions = 400;
  static constexpr double kBase = 100;

  MlaSequences(const MlaSpec& spec, const TestMlaWeights& weights,
               const std::vector<int64_t>& lengths, Rng& rng,
               RotaryStyle style = RotaryStyle::kPairs)
      : spec_(spec),
        weights_(weights),
        reference_(spec, weights.values, style, kBase) {
    RotaryEmbeddingSpec rope;
    rope.head_dim = rope.rot_dim = spec.rope;
    rope.max_positions = kMaxPositions;
    rope.base = kBase;
    rope.style = style;
    rope.dtype = spec.dtype;
    rope_ = std::make_unique<RotaryEmbeddingPlan>(
        RotaryEmbeddingPlan::Create(rope).value());
    std::vector<int32_t> ids;
    for (const int64_t length : lengths) {
      Sequence s;
      const AnyMatrix x(
          spec.dtype, ToDoubles(UniformReals(rng, length * spec.hidden, -2, 2)),
          length, spec.hidden, spec.hidden);
      s.x = x.doubles();
      if (spec.residual) {
        const AnyMatrix residual(
            spec.dtype_of_out(),
            ToDoubles(UniformReals(rng, length * spec.hidden, -2, 2)), length,
            spec.hidden, spec.hidden);
        s.residual = residual.doubles();
      }
      s.pages.resize(
          static_cast<size_t>(DivCeil(length, spec.cache.page_size())));
      sequences_.push_back(s);
      for (size_t i = 0; i < s.pages.size(); ++i) {
        ids.push_back(static_cast<int32_t>(ids.size()));
      }
    }
    // A page more that no sequence has.
    num_pages_ = static_cast<int64_t>(ids.size()) + 1;
    rng.Shuffle(ids);
    for (Sequence& s : sequences_) {
      for (int32_t& page : s.pages) {
        page = ids.back();
        ids.pop_back();
      }
    }
    cache_ = std::make_unique<GuardBuffer<uint8_t>>(num_pages_ *
                                                    spec.cache.page_bytes());
    // NaN in every dtype.
    std::memset(cache_->data(), 0xff, static_cast<size_t>(cache_->size()));
  }

  // One call for the next tokens of these sequences. A residual is out itself
  // where the number of tokens is odd.
  void Step(const MlaPlan& plan, const std::vector<MlaPart>& parts,
            Executor& executor) {
    std::vector<int64_t> q_lens, kv_lens, positions;
    std::vector<double> x, residual;
    PageTableStorage table;
    for (const MlaPart& part : parts) {
      Sequence& s = sequences_[part.sequence];
      for (int64_t i = 0; i < part.tokens; ++i) {
        positions.push_back(s.length + i);
      }
      const auto begin = s.x.begin() + s.length * spec_.hidden;
      x.insert(x.end(), begin, begin + part.tokens * spec_.hidden);
      if (spec_.residual) {
        const auto add = s.residual.begin() + s.length * spec_.hidden;
        residual.insert(residual.end(), add, add + part.tokens * spec_.hidden);
      }
      s.length += part.tokens;
      q_lens.push_back(part.tokens);
      kv_lens.push_back(s.length);
      table.Append(s.pages);
    }
    const auto tokens = static_cast<int64_t>(positions.size());
    const auto pages = table.Build(spec_.cache.page_size(), num_pages_);
    ASSERT_TRUE(pages.ok()) << pages.status();
    const auto schedule =
        MlaSchedule::Build(plan.spec(), {q_lens, kv_lens, *pages},
                           executor.num_workers(), storage_);
    ASSERT_TRUE(schedule.ok()) << schedule.status();
    const AnyMatrix in(spec_.dtype, x, tokens, spec_.hidden, spec_.hidden + 3);
    // `out` begins as NaN, or as the residual if there is one.
    if (residual.empty()) residual.assign(x.size(), std::nan(""));
    const DType out_dtype = spec_.dtype_of_out();
    const AnyMatrix out(out_dtype, residual, tokens, spec_.hidden,
                        spec_.hidden + 5);
    const AnyMatrix apart(out_dtype, residual, tokens, spec_.hidden,
                          spec_.hidden + 1);
    MlaArgs args = Args(in, out, positions, *schedule);
    if (spec_.residual) {
      args.residual = tokens % 2 == 1 ? out.const_view() : apart.const_view();
    }
    const auto bytes = plan.WorkspaceBytes(*schedule, executor.num_workers());
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    ExpectWithinLimits(plan, q_lens, kv_lens, executor.num_workers(), *bytes);
    GuardBuffer<uint8_t> memory(*bytes);
    const Workspace workspace(memory.data(), static_cast<size_t>(*bytes));
    ASSERT_EQ(plan.CheckArgs(args), absl::OkStatus());
    EXPECT_NO_ALLOCATION(plan.Execute(args, workspace, executor));
    Keep(parts, *schedule, out);
  }

  MlaArgs Args(const AnyMatrix& in, const AnyMatrix& out,
               const std::vector<int64_t>& positions,
               const MlaSchedule& schedule) const {
    MlaArgs args;
    args.x = in.const_view();
    args.positions =
        DenseVector(positions.data(), static_cast<int64_t>(positions.size()));
    if (weights_.q_norm != nullptr) args.q_norm = weights_.q_norm->vector();
    args.kv_norm = weights_.kv_norm->vector();
    args.rope = rope_.get();
    args.cache = KvCacheView(spec_.cache, num_pages_, cache_->data());
    args.schedule = schedule;
    args.out = out.view();
    return args;
  }

  // All tokens so far against the oracle, in the form that computed each: each
  // token, and all of a sequence. In f32 each element is within its bound, too.
  // Codes of three bits are judged by bounds alone: samples of their roundings
  // are as wide as a verdict may be.
  void ExpectOracle() const {
    const bool blocks = spec_.cache.scaling() == KvScaling::kPerBlock;
    for (size_t i = 0; i < sequences_.size(); ++i) {
      SCOPED_TRACE(testing::Message() << "sequence " << i);
      std::vector<double> values, errors;
      RoundingRows rows;
      for (const BoundedRow& row : Oracle(sequences_[i])) {
        RoundingError token;
        for (const Bounded& v : row) {
          token.Add(sequences_[i].out[values.size()], v.value,
                    v.rounded - v.value);
          values.push_back(v.value);
          errors.push_back(v.error);
        }
        rows.Add(token);
      }
      EXPECT_EQ(sequences_[i].out.size(), values.size());
      if (values.empty()) continue;
      if (!blocks) {
        EXPECT_EQ(rows.Complaint(), "");
      }
      if (spec_.dtype != DType::kF32) continue;
      EXPECT_TRUE(AllWithin(sequences_[i].out, values, [&](double, int64_t at) {
        return errors[static_cast<size_t>(at)];
      }));
    }
  }

  // The oracle's numbers for the tokens of a sequence so far.
  std::vector<BoundedRow> OracleOf(size_t sequence) const {
    return Oracle(sequences_[sequence]);
  }
  const std::vector<double>& out(size_t sequence) const {
    return sequences_[sequence].out;
  }
  // Whether token t of the sequence was computed in the direct form.
  bool WasDirect(size_t sequence, size_t t) const {
    return sequences_[sequence].direct[t];
  }
  const RotaryEmbeddingPlan& rope() const { return *rope_; }
  int64_t num_pages() const { return num_pages_; }

 private:
  struct Sequence {
    std::vector<double> x;         // [tokens, hidden], all that there will be
    std::vector<double> residual;  // likewise; empty without one
    std::vector<int32_t> pages;
    int64_t length = 0;
    std::vector<double> out;  // rows of the tokens so far
    std::vector<bool> direct;
  };

  void Keep(const std::vector<MlaPart>& parts, const MlaSchedule& schedule,
            const AnyMatrix& out) {
    const std::vector<double> rows = out.doubles();
    std::vector<bool> direct(static_cast<size_t>(schedule.num_tokens()));
    for (const int32_t t : schedule.direct_tokens()) {
      direct[static_cast<size_t>(t)] = true;
    }
    size_t token = 0;
    const auto hidden = static_cast<size_t>(spec_.hidden);
    for (const MlaPart& part : parts) {
      Sequence& s = sequences_[part.sequence];
      for (int64_t i = 0; i < part.tokens; ++i, ++token) {
        for (size_t c = 0; c < hidden; ++c) {
          s.out.push_back(rows[token * hidden + c]);
        }
        s.direct.push_back(direct[token]);
      }
    }
  }

  // The workspace that limits ask for is enough for every step within them.
  static void ExpectWithinLimits(const MlaPlan& plan,
                                 const std::vector<int64_t>& q_lens,
                                 const std::vector<int64_t>& kv_lens,
                                 int workers, int64_t bytes) {
    AttentionLimits limits;
    limits.max_sequences = static_cast<int64_t>(q_lens.size());
    for (size_t s = 0; s < q_lens.size(); ++s) {
      limits.max_tokens += q_lens[s];
      limits.max_kv_len = std::max(limits.max_kv_len, kv_lens[s]);
    }
    const auto most = plan.WorkspaceBytes(limits, workers);
    ASSERT_TRUE(most.ok()) << most.status();
    EXPECT_LE(bytes, *most);
  }

  std::vector<BoundedRow> Oracle(const Sequence& s) const {
    std::vector<ReferenceMlaKey> seen;
    std::vector<BoundedRow> out;
    for (size_t t = 0; t < static_cast<size_t>(s.length); ++t) {
      const auto begin = s.x.begin() + static_cast<int64_t>(t) * spec_.hidden;
      const std::vector<double> x(begin, begin + spec_.hidden);
      const auto position = static_cast<int64_t>(t);
      seen.push_back(reference_.Key(x, position));
      std::vector<double> residual;
      if (spec_.residual) {
        const auto add =
            s.residual.begin() + static_cast<int64_t>(t) * spec_.hidden;
        residual.assign(add, add + spec_.hidden);
      }
      out.push_back(reference_.Token(s.direct[t], x, position, seen, residual));
    }
    return out;
  }

  MlaSpec spec_;
  const TestMlaWeights& weights_;
  ReferenceMla reference_;
  std::unique_ptr<RotaryEmbeddingPlan> rope_;
  std::vector<Sequence> sequences_;
  int64_t num_pages_ = 0;
  std::unique_ptr<GuardBuffer<uint8_t>> cache_;
  MlaScheduleStorage storage_;
};

}  // namespace quern

#endif  // QUERN_OPS_MLA_MLA_TESTUTIL_H_
