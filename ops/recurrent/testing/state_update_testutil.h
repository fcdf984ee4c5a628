#ifndef QUERN_OPS_RECURRENT_TESTING_STATE_UPDATE_TESTUTIL_H_
#define QUERN_OPS_RECURRENT_TESTING_STATE_UPDATE_TESTUTIL_H_

// The arguments of one call of the state update, between guard pages and with
// poison between rows, and what the oracle says of them.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/any_matrix_testutil.h"
#include "quern/ops/recurrent/state_update.h"
#include "quern/ops/recurrent/testing/reference_state_update_testutil.h"
#include "quern/ops/recurrent/testing/sequences_testutil.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"

namespace quern {

class StateUpdateData {
 public:
  // d, z and dt_bias that are empty are left out.
  struct Values {
    Doubles state, x, dt, a, b, c, d, z, dt_bias;
  };
  // Rows of `pad` more elements than they need.
  StateUpdateData(const StateUpdateSpec& spec, int64_t tokens, int64_t slots,
                  const Values& values, int64_t pad = 3)
      : spec_(spec),
        tokens_(tokens),
        slots_(slots),
        has_d_(!values.d.empty()),
        has_z_(!values.z.empty()),
        has_bias_(!values.dt_bias.empty()),
        state_(Make(spec.state_dtype, values.state, slots * head_rows(),
                    spec.d_state, pad)),
        x_(Make(spec.dtype, values.x, tokens, head_rows(), pad)),
        dt_(Make(spec.dtype, values.dt, tokens, numbers(), pad)),
        a_(per_row()
               ? Make(DType::kF32, values.a, head_rows(), spec.d_state, pad)
               : Make(DType::kF32, values.a, 1, spec.heads, 0)),
        b_(Make(spec.dtype, values.b, tokens, spec.groups * spec.d_state, pad)),
        c_(Make(spec.dtype, values.c, tokens, spec.groups * spec.d_state, pad)),
        d_(Optional(values.d)),
        bias_(Optional(values.dt_bias)),
        z_(Make(spec.dtype,
                has_z_ ? values.z
                       : Doubles(static_cast<size_t>(tokens * head_rows())),
                tokens, head_rows(), pad)),
        out_(spec.dtype, tokens, head_rows(), head_rows() + pad) {}

  // Numbers in [-1, 1), rates a in [-2, 0).
  static Values Random(const StateUpdateSpec& spec, int64_t tokens,
                       int64_t slots, Rng& rng) {
    const int64_t rows = spec.heads * spec.head_dim;
    const bool per_row = spec.form == SsmForm::kPerRow;
    const int64_t numbers = per_row ? rows : spec.heads;
    const auto reals = [&](int64_t n, double lo, double hi) {
      return ToDoubles(UniformReals(rng, n, lo, hi));
    };
    return {reals(slots * rows * spec.d_state, -1, 1),
            reals(tokens * rows, -1, 1),
            reals(tokens * numbers, -1, 1),
            reals(per_row ? rows * spec.d_state : spec.heads, -2, 0),
            reals(tokens * spec.groups * spec.d_state, -1, 1),
            reals(tokens * spec.groups * spec.d_state, -1, 1),
            reals(numbers, -1, 1),
            reals(tokens * rows, -3, 3),
            reals(numbers, -1, 1)};
  }

  StateUpdateArgs args(const Sequences& sequences) const {
    const StateUpdateSpec& s = spec_;
    StateUpdateArgs args;
    const AnyTensorView rows = state_.view();
    const int64_t row = rows.stride(0);
    args.state =
        AnyTensorView(s.state_dtype, rows.mutable_data(), 4,
                      {slots_, s.heads, s.head_dim, s.d_state},
                      {s.heads * s.head_dim * row, s.head_dim * row, row, 1});
    args.x = x_.heads(s.heads, s.head_dim, s.head_dim);
    args.dt =
        per_row() ? dt_.heads(s.heads, s.head_dim, s.head_dim) : dt_.view();
    if (per_row()) {
      const AnyTensorView a = a_.view();
      args.a = AnyTensorView(DType::kF32, a.data(), 3,
                             {s.heads, s.head_dim, s.d_state},
                             {s.head_dim * a.stride(0), a.stride(0), 1});
    } else {
      args.a = a_.vector();
    }
    args.b = b_.heads(s.groups, s.d_state, s.d_state);
    args.c = c_.heads(s.groups, s.d_state, s.d_state);
    if (has_d_) args.d = per_row() ? d_.view() : d_.vector();
    if (has_bias_) args.dt_bias = per_row() ? bias_.view() : bias_.vector();
    if (has_z_) args.z = z_.heads(s.heads, s.head_dim, s.head_dim);
    args.batch = sequences.batch();
    args.out = out_.heads(s.heads, s.head_dim, s.head_dim);
    return args;
  }
  const AnyMatrix& state() const { return state_; }
  const AnyMatrix& out() const { return out_; }
  const AnyMatrix& x() const { return x_; }
  const AnyMatrix& z() const { return z_; }

  // What the state and out should be, and how far they may be off. `before`:
  // the state that the call found. Elements that no sequence has keep their
  // state, and NaN, the poison, in out.
  struct Expected {
    Doubles state, state_bounds, out, out_bounds;
  };
  Expected Expect(const Sequences& sequences, const Doubles& before) const {
    const auto count = static_cast<size_t>(tokens_ * head_rows());
    Expected want = {before, Doubles(before.size(), 0.0),
                     Doubles(count, std::nan("")), Doubles(count, 0.0)};
    const Inputs in = {x_.doubles(),    dt_.doubles(), a_.doubles(),
                       b_.doubles(),    c_.doubles(),  d_.doubles(),
                       bias_.doubles(), z_.doubles()};
    const SequenceBatch batch = sequences.batch();
    for (int64_t i = 0; i < batch.sequences(); ++i) {
      for (int64_t r = 0; r < head_rows(); ++r) {
        ExpectRow(batch, i, r, in, want);
      }
    }
    return want;
  }

  void ExpectResults(const Sequences& sequences, const Doubles& before) const {
    const Expected want = Expect(sequences, before);
    // Where a NaN is expected there is no distance.
    const auto bound = [](double x, double error) {
      return std::isnan(x) ? 0.0 : error;
    };
    EXPECT_TRUE(AllWithin(out_.doubles(), want.out, [&](double x, int64_t i) {
      const double e = want.out_bounds[static_cast<size_t>(i)];
      return bound(x, e + ResultBound(spec_.dtype, std::abs(x) + e, 0));
    }));
    EXPECT_TRUE(
        AllWithin(state_.doubles(), want.state, [&](double x, int64_t i) {
          return bound(x, want.state_bounds[static_cast<size_t>(i)]);
        }));
  }

 private:
  struct Inputs {
    Doubles x, dt, a, b, c, d, bias, z;
  };
  bool per_row() const { return spec_.form == SsmForm::kPerRow; }
  int64_t head_rows() const { return spec_.heads * spec_.head_dim; }
  // How many numbers dt has for a token, and d and dt_bias have in all.
  int64_t numbers() const { return per_row() ? head_rows() : spec_.heads; }
  static AnyMatrix Make(DType dtype, const Doubles& values, int64_t rows,
                        int64_t cols, int64_t pad) {
    return AnyMatrix(dtype, values, rows, cols, cols + pad);
  }
  AnyMatrix Optional(const Doubles& values) const {
    const Doubles zeros(static_cast<size_t>(numbers()));
    const Doubles& v = values.empty() ? zeros : values;
    return per_row() ? Make(DType::kF32, v, spec_.heads, spec_.head_dim, 2)
                     : Make(DType::kF32, v, 1, spec_.heads, 0);
  }
  static Doubles Part(const Doubles& all, int64_t at, int64_t n) {
    return Doubles(all.begin() + at, all.begin() + at + n);
  }

  // Tokens of a chunk of a sequence, 1 where it goes token by token.
  int64_t Chunk(int64_t tokens) const {
    if (per_row() || tokens < StateUpdatePlan::kChunkedFrom) return 1;
    return spec_.chunk == 0 ? StateUpdatePlan::kChunk : spec_.chunk;
  }

  void ExpectRow(const SequenceBatch& batch, int64_t sequence, int64_t r,
                 const Inputs& in, Expected& want) const {
    const StateUpdateSpec& s = spec_;
    const int64_t slot = batch.state_indices[sequence];
    const int64_t begin = batch.begin(sequence), end = batch.end(sequence);
    if (slot == s.null_slot) {
      for (int64_t t = begin; t < end; ++t) {
        want.out[static_cast<size_t>(t * head_rows() + r)] = 0;
      }
      return;
    }
    if (begin == end) return;
    const int64_t n = s.d_state, at = (slot * head_rows() + r) * n;
    StateUpdateReference reference(batch.fresh(sequence)
                                       ? Doubles(static_cast<size_t>(n))
                                       : Part(want.state, at, n),
                                   s.state_dtype, Chunk(end - begin));
    const int64_t head = r / s.head_dim;
    const int64_t group = head / (s.heads / s.groups);
    const int64_t number = per_row() ? r : head;
    for (int64_t t = begin; t < end; ++t) {
      const auto i = static_cast<size_t>(t * head_rows() + r);
      StateUpdateToken64 token;
      token.x = in.x[i];
      token.dt = in.dt[static_cast<size_t>(t * numbers() + number)];
      token.bias = in.bias[static_cast<size_t>(number)];
      token.d = in.d[static_cast<size_t>(number)];
      token.a = per_row() ? Part(in.a, r * n, n)
                          : Doubles(static_cast<size_t>(n),
                                    in.a[static_cast<size_t>(head)]);
      token.b = Part(in.b, (t * s.groups + group) * n, n);
      token.c = Part(in.c, (t * s.groups + group) * n, n);
      token.softplus = s.delta == SsmDelta::kSoftplus;
      token.gated = has_z_;
      token.z = in.z[i];
      reference.Step(token);
      want.out[i] = reference.y();
      want.out_bounds[i] = reference.y_bound();
    }
    reference.Finish();
    for (int64_t i = 0; i < n; ++i) {
      const auto e = static_cast<size_t>(at + i);
      want.state[e] = reference.row()[static_cast<size_t>(i)];
      want.state_bounds[e] = reference.bound(static_cast<size_t>(i));
    }
  }

  StateUpdateSpec spec_;
  int64_t tokens_, slots_;
  bool has_d_, has_z_, has_bias_;
  AnyMatrix state_, x_, dt_, a_, b_, c_, d_, bias_, z_, out_;
};

}  // namespace quern

#endif  // QUERN_OPS_RECURRENT_TESTING_STATE_UPDATE_TESTUTIL_H_
