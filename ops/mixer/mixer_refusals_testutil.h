#ifndef QUERN_OPS_MIXER_MIXER_REFUSALS_TESTUTIL_H_
#define QUERN_OPS_MIXER_MIXER_REFUSALS_TESTUTIL_H_

// What all layers refuse of the arguments that they have in common.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/mixer/mixer_frame.h"
#include "quern/ops/recurrent/sequence_batch.h"
#include "quern/testing/refusal.h"

namespace quern {

// A dense [rows, columns] of x's dtype in the memory of `v`.
inline AnyTensorView RowsAt(const AnyTensorView& v, const MixerArgs& a,
                            int64_t rows, int64_t columns) {
  return AnyTensorView(a.x.dtype(), const_cast<void*>(v.data()), 2,
                       {rows, columns}, {columns, 1});
}
inline AnyTensorView ReadOnly(const AnyTensorView& v) {
  AnyTensorView::Dims extents{}, strides{};
  for (int d = 0; d < std::min(v.rank(), AnyTensorView::kMaxRank); ++d) {
    extents[static_cast<size_t>(d)] = v.extent(d);
    strides[static_cast<size_t>(d)] = v.stride(d);
  }
  return AnyTensorView(v.dtype(), v.data(), v.rank(), extents, strides);
}

// `status` refuses with these words, and in the name of `op`: a step's name
// would tell of fields that the layer's spec lacks.
inline void ExpectOwnRefusal(const std::string& op, const absl::Status& status,
                             const std::string& words) {
  EXPECT_FALSE(status.ok()) << words;
  EXPECT_EQ(status.message().substr(0, op.size() + 2), op + ": ") << status;
  EXPECT_NE(std::string(status.message()).find(words), std::string::npos)
      << status << "\nlacks: " << words;
}

// `good`: arguments of four tokens, one for each of slots 0 to 3 of 5, which
// the plan accepts. layer(args) is their common part. op: the plan's name.
template <typename Plan, typename Args, typename Layer>
void ExpectCommonRefusals(const std::string& op, const Plan& plan,
                          const Args& good, const Layer& layer) {
  ASSERT_EQ(plan.CheckArgs(good), absl::OkStatus());
  struct Case {
    void (*spoil)(MixerArgs&);
    std::string words;
  };
  const Case cases[] = {
      {[](MixerArgs& a) { a.x = a.conv_weight; }, "x is"},
      {[](MixerArgs& a) { a.conv_weight = a.x; }, "conv_weight is"},
      {[](MixerArgs& a) { a.conv_bias = a.x; }, "conv_bias is"},
      {[](MixerArgs& a) { a.conv_state = a.x; }, "conv_state is"},
      {[](MixerArgs& a) { a.conv_state = ReadOnly(a.conv_state); },
       "conv_state is read-only"},
      {[](MixerArgs& a) {
         const AnyTensorView& v = a.conv_state;
         a.conv_state = AnyTensorView(
             v.dtype(), v.mutable_data(), 3,
             {v.extent(0), a.conv_weight.extent(1) - 2, v.extent(2)},
             {v.stride(0), v.stride(1), 1});
       },
       "rows of conv_state="},
      {[](MixerArgs& a) { a.out = a.conv_state; }, "out is"},
      {[](MixerArgs& a) { a.out = ReadOnly(a.out); }, "out is read-only"},
      {[](MixerArgs& a) { a.out = RowsAt(a.x, a, 4, a.x.extent(1)); },
       "out overlaps x"},
      {[](MixerArgs& a) { a.out = RowsAt(a.conv_state, a, 4, a.x.extent(1)); },
       "out overlaps conv_state"},
      {[](MixerArgs& a) {
         const AnyTensorView& w = a.conv_weight;
         a.conv_weight =
             AnyTensorView(w.dtype(), a.conv_state.data(), 2,
                           {w.extent(0), w.extent(1)}, {w.stride(0), 1});
       },
       "conv_state overlaps conv_weight"},
      {[](MixerArgs& a) {
         static const int64_t beyond[] = {0, 1, 2, 5};
         a.batch.state_indices = DenseVector(beyond, 4);
       },
       "state_indices[3]=5; need 0 <= index < 5"},
      {[](MixerArgs& a) {
         static const int64_t twice[] = {0, 1, 2, 1};
         a.batch.state_indices = DenseVector(twice, 4);
       },
       "state_indices"},
      {[](MixerArgs& a) {
         static const int64_t falling[] = {0, 2, 1, 3, 4};
         a.batch.query_start_loc = DenseVector(falling, 5);
       },
       "query_start_loc"},
      {[](MixerArgs& a) {
         static const int64_t beyond[] = {0, 1, 2, 3, 5};
         a.batch.query_start_loc = DenseVector(beyond, 5);
       },
       "query_start_loc"},
      {[](MixerArgs& a) {
         static const uint8_t few[] = {1, 1, 1};
         a.batch.has_initial_state = few;
       },
       "has_initial_state"},
      // Regression: the convolution wrote a window for each token behind the
      // rows of a slot.
      {[](MixerArgs& a) {
         static const int64_t accepted[] = {1, 1, 1, 1};
         a.batch.num_accepted_tokens = DenseVector(accepted, 4);
       },
       "num_accepted_tokens without drafts; need rows of state_indices, or "
       "destination_indices"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.words);
    Args args = good;
    c.spoil(layer(args));
    ExpectRefusal(plan.CheckArgs(args), op + ": " + c.words);
  }
  // Accepted tokens of drafts, which have destinations.
  const int64_t numbers[] = {0, 1, 2, 3}, accepted[] = {1, 1, 1, 1};
  Args drafts = good;
  SequenceBatch& batch = layer(drafts).batch;
  batch.num_accepted_tokens = DenseVector(accepted, 4);
  batch.destination_indices = DenseVector(numbers, 4);
  batch.destination_columns = 1;
  EXPECT_EQ(plan.CheckArgs(drafts), absl::OkStatus());
}

// The plan's products are oneDNN's, which hold strides as 32-bit numbers of
// bytes. Other things are as in ExpectCommonRefusals.
template <typename Plan, typename Args, typename Layer>
void ExpectStrideRefusals(const std::string& op, const Plan& plan,
                          const Args& good, const Layer& layer) {
  ASSERT_EQ(plan.CheckArgs(good), absl::OkStatus());
  constexpr int64_t kBeyond = int64_t{1} << 29;
  Args args = good;
  MixerArgs& common = layer(args);
  const MixerArgs before = common;
  const int64_t columns = before.x.extent(1);
  const AnyTensorView::Dims extents = {4, columns};
  const std::string range = absl::StrCat("; need ", columns, " <= ");
  for (const int64_t stride : {kBeyond, columns - 1, int64_t{0}}) {
    common = before;
    common.x = AnyTensorView(before.x.dtype(), before.x.data(), 2, extents,
                             {stride, 1});
    ExpectRefusal(plan.CheckArgs(args),
                  absl::StrCat(op, ": x.stride(0)=", stride, range,
                               "x.stride(0) <= 536870911"));
  }
  common = before;
  common.out = AnyTensorView(before.out.dtype(), before.out.mutable_data(), 2,
                             extents, {kBeyond, 1});
  ExpectRefusal(plan.CheckArgs(args),
                absl::StrCat(op, ": out.stride(0)=536870912", range,
                             "out.stride(0) <= 536870911"));
}

}  // namespace quern

#endif  // QUERN_OPS_MIXER_MIXER_REFUSALS_TESTUTIL_H_
