// Every operator on views of every kind: each tensor in turn has a stride that
// is too small, too large or negative, a misaligned or null address, or may not
// be written. What Prepare and CheckArgs accept is executed, and has the bits
// that dense tensors of the same elements have; so a plan that asserts what its
// operator has not checked ends this test where checks are on, and one that
// ignores a stride fails it everywhere.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/all_ops.h"
#include "quern/ops/registry/all_ops_testutil.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

using Dims = AnyTensorView::Dims;
constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

// What differs from a dense tensor that may be written.
struct Change {
  std::string what;
  size_t tensor = 0;
  Dims strides{};
  bool read_only = false;
  bool null = false;
  int64_t shift = 0;      // in bytes, from an aligned address
  bool overlaps = false;  // elements lie in one place
  bool must_be_refused = false;
};

// Weights that are packed. None of their elements may overlap, whichever
// implementation there is, because packing some of them refuses that.
const std::set<std::pair<std::string, std::string>>& PackedWeights() {
  static const auto* const weights =
      new std::set<std::pair<std::string, std::string>>{
          {"column_parallel_linear", "weight"},
          {"conv2d", "weight"},
          {"conv3d", "weight"},
          {"convert_weight_packed", "weight"},
          {"create_onednn_mm", "b"},
          {"create_onednn_scaled_mm", "b"},
          {"fp8_scaled_mm_cpu", "mat2"},
          {"int8_scaled_mm_cpu", "mat2"},
          {"int8_scaled_mm_with_quant", "mat2"},
          {"pack_vnni", "weight"},
          {"parallel_lm_head", "weight"},
          {"replicated_linear", "weight"},
          {"row_parallel_linear", "weight"},
          {"weight_packed_linear", "mat2"},
      };
  return *weights;
}

std::vector<Change> ChangesOf(const std::vector<TensorMeta>& metas) {
  std::vector<Change> changes(1);
  changes[0].what = "dense";
  changes[0].strides = DenseStrides(metas[0].extents);
  for (size_t t = 0; t < metas.size(); ++t) {
    const TensorMeta& meta = metas[t];
    const Dims dense = DenseStrides(meta.extents);
    const auto add = [&](const std::string& what,
                         const std::function<void(Change&)>& change) {
      changes.emplace_back();
      changes.back().what = "tensor " + std::to_string(t) + " " + what;
      changes.back().tensor = t;
      changes.back().strides = dense;
      change(changes.back());
    };
    add("read-only", [](Change& c) { c.read_only = true; });
    add("null", [](Change& c) {
      c.null = true;
      c.must_be_refused = true;
    });
    if (SizeOf(meta.dtype) > 1) {
      add("misaligned", [](Change& c) {
        c.shift = 1;
        c.must_be_refused = true;
      });
    }
    for (size_t d = 0; d < meta.extents.size(); ++d) {
      const bool single = meta.extents[d] == 1;
      const std::set<int64_t> strides = {0, dense[d] - 1, dense[d] + 1, -1,
                                         kHuge};
      for (const int64_t stride : strides) {
        for (const bool read_only : {false, true}) {
          add("stride(" + std::to_string(d) + ")=" + std::to_string(stride) +
                  (read_only ? " read-only" : ""),
              [&](Change& c) {
                c.strides[d] = stride;
                // Dimensions outside it step over what it covers now.
                for (size_t o = d;
                     stride > dense[d] && stride != kHuge && o-- > 0;) {
                  c.strides[o] = c.strides[o + 1] * meta.extents[o + 1];
                }
                c.read_only = read_only;
                c.overlaps = !single && stride < dense[d];
                c.must_be_refused = !single && (stride < 0 || stride == kHuge);
              });
        }
      }
    }
  }
  return changes;
}

class AllOpsViewsTest : public testing::Test {
 protected:
  AllOpsViewsTest() { EXPECT_EQ(RegisterAllOps(registry_), absl::OkStatus()); }

  absl::Status Run(const MadeOp& op, const std::vector<AnyTensorView>& views) {
    return RunStep(op, views, executor_);
  }

  void TryAll(const std::string& name, const std::string& provider,
              DType dtype);

  OpRegistry registry_;
  InlineExecutor executor_;
  Rng rng_{20261125};
  std::set<std::string> executed_, packed_;
  int64_t accepted_ = 0, refused_ = 0;
};

void AllOpsViewsTest::TryAll(const std::string& name,
                             const std::string& provider, DType dtype) {
  const NamedArgs args = registry_.Find(name)->example(dtype);
  const OpDispatcher ops(registry_, OpPolicy());
  const auto made = ops.MakeFrom(provider, name, args);
  if (!made.ok()) return;  // no kernel for these dtypes
  const auto given = GivenTensors::Of(registry_, name, args);
  ASSERT_TRUE(given.ok()) << given.status();
  const std::vector<TensorMeta>& metas = given->metas;
  const std::vector<size_t>& places = given->places;
  const size_t all = given->all;
  std::vector<bool> packed;
  for (const std::string& tensor : given->names) {
    packed.push_back(PackedWeights().count({name, tensor}) > 0);
    if (packed.back()) packed_.insert(name);
  }
  std::vector<std::vector<uint8_t>> elements;
  for (const TensorMeta& meta : metas) {
    elements.push_back(SomeElements(rng_, meta));
  }
  for (const Change& change : ChangesOf(metas)) {
    SCOPED_TRACE(name + " of " + provider + ", " +
                 std::string(DTypeName(dtype)) + ": " + change.what);
    const MadeOp op = *ops.MakeFrom(provider, name, args);
    const MadeOp other = *ops.MakeFrom(provider, name, args);
    std::vector<Tensor> tensors, dense;
    std::vector<AnyTensorView> views(all), dense_views(all);
    for (size_t t = 0; t < metas.size(); ++t) {
      const bool here = t == change.tensor;
      const Dims strides = DenseStrides(metas[t].extents);
      tensors.emplace_back(metas[t], here ? change.strides : strides,
                           here ? change.shift : 0);
      tensors.back().Write(elements[t]);
      views[places[t]] =
          tensors.back().View(here && change.read_only, here && change.null);
      dense.emplace_back(metas[t], strides, 0);
      dense.back().Write(tensors.back().Read());
      dense_views[places[t]] =
          dense.back().View(here && change.read_only, false);
    }
    const absl::Status status = Run(op, views);
    if (!status.ok()) {
      ++refused_;
      EXPECT_TRUE(absl::IsInvalidArgument(status) ||
                  absl::IsUnimplemented(status))
          << status;
      continue;
    }
    ++accepted_;
    executed_.insert(name);
    EXPECT_FALSE(change.must_be_refused ||
                 (packed[change.tensor] && change.overlaps));
    if (!tensors[change.tensor].in_memory()) continue;
    EXPECT_TRUE(tensors[change.tensor].GapsAreIntact());
    const absl::Status of_dense = Run(other, dense_views);
    EXPECT_EQ(of_dense, absl::OkStatus());
    if (!of_dense.ok()) continue;
    for (size_t t = 0; t < metas.size(); ++t) {
      EXPECT_EQ(tensors[t].Read(), dense[t].Read()) << "tensor " << t;
    }
  }
}

TEST_F(AllOpsViewsTest, WhatIsAcceptedHasTheBitsOfDenseTensors) {
  for (const std::string& name : registry_.Names()) {
    for (const auto& made : registry_.Find(name)->implementations) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        TryAll(name, std::string(made.provider), dtype);
        if (HasFatalFailure()) return;
      }
    }
  }
  std::set<std::string> never;
  for (const std::string& name : registry_.Names()) {
    if (executed_.count(name) == 0) never.insert(name);
  }
  // Their steps and lengths agree with one another in tests of their own.
  EXPECT_EQ(never, (std::set<std::string>{
                       "cpu_attention_with_kv_cache", "extend_attention_cpu",
                       "multi_head_latent_attention", "paged_attention"}));
  EXPECT_EQ(packed_.size(), PackedWeights().size());
  EXPECT_GT(accepted_, 1000);
  EXPECT_GT(refused_, 1000);
}

}  // namespace
}  // namespace quern
