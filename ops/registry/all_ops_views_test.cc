// Every operator on views of every kind: each tensor in turn has a stride that
// is too small, too large or negative, a misaligned or null address, or may not
// be written. What Prepare and CheckArgs accept is executed, and has the bits
// that dense tensors of the same elements have; so a plan that asserts what its
// operator has not checked ends this test where checks are on, and one that
// ignores a stride fails it everywhere.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/all_ops.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_schema.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/reference_convert.h"

namespace quern {
namespace {

using Dims = AnyTensorView::Dims;
constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

Dims DenseStrides(const std::vector<int64_t>& extents) {
  Dims strides{};
  int64_t stride = 1;
  for (size_t d = extents.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= extents[d];
  }
  return strides;
}

int64_t CountOf(const TensorMeta& meta) {
  int64_t count = 1;
  for (const int64_t extent : meta.extents) count *= extent;
  return count;
}

// The place of element i, in row-major order, in a view of these strides.
int64_t PlaceOf(const TensorMeta& meta, const Dims& strides, int64_t i) {
  int64_t place = 0;
  for (size_t d = meta.extents.size(); d-- > 0;) {
    place += i % meta.extents[d] * strides[d];
    i /= meta.extents[d];
  }
  return place;
}

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

// A tensor in memory of its own, between the elements of which is poison.
class Tensor {
 public:
  Tensor(const TensorMeta& meta, const Dims& strides, int64_t shift)
      : meta_(meta), strides_(strides), size_(SizeOf(meta.dtype)) {
    int64_t last = 0;
    bool fits = true;  // else the view is refused, whatever its memory
    for (size_t d = 0; d < meta.extents.size(); ++d) {
      const int64_t steps = meta.extents[d] - 1;
      if (steps <= 0) continue;
      fits = fits && strides[d] >= 0 && strides[d] < 4096;
      if (fits) last += steps * strides[d];
    }
    in_memory_ = fits;
    const int64_t elements = CountOf(meta) == 0 ? 0 : fits ? last + 1 : 1;
    memory_ = std::make_unique<GuardBuffer<uint8_t>>(
        elements * static_cast<int64_t>(size_) + shift);
    data_ = memory_->data();
  }

  bool in_memory() const { return in_memory_; }
  AnyTensorView View(bool read_only, bool null) const {
    Dims extents{};
    for (size_t d = 0; d < meta_.extents.size(); ++d) {
      extents[d] = meta_.extents[d];
    }
    const auto rank = static_cast<int>(meta_.extents.size());
    void* const data = null ? nullptr : data_;
    if (!read_only) {
      return AnyTensorView(meta_.dtype, data, rank, extents, strides_);
    }
    return AnyTensorView(meta_.dtype, static_cast<const void*>(data), rank,
                         extents, strides_);
  }
  void Write(const std::vector<uint8_t>& dense) {
    if (!in_memory_) return;
    for (int64_t i = 0; i < CountOf(meta_); ++i) {
      std::memcpy(At(i), dense.data() + static_cast<size_t>(i) * size_, size_);
    }
  }
  std::vector<uint8_t> Read() const {
    std::vector<uint8_t> dense(static_cast<size_t>(CountOf(meta_)) * size_);
    if (!in_memory_) return dense;
    for (int64_t i = 0; i < CountOf(meta_); ++i) {
      std::memcpy(dense.data() + static_cast<size_t>(i) * size_, At(i), size_);
    }
    return dense;
  }
  // Whether nothing was written between the elements.
  bool GapsAreIntact() const {
    if (!in_memory_) return true;
    std::vector<bool> element(static_cast<size_t>(memory_->size()));
    for (int64_t i = 0; i < CountOf(meta_); ++i) {
      const auto at = static_cast<size_t>(At(i) - memory_->data());
      std::fill_n(element.begin() + static_cast<ptrdiff_t>(at), size_, true);
    }
    for (size_t i = 0; i < element.size(); ++i) {
      if (!element[i] && !IsPoison(memory_->data()[i])) return false;
    }
    return true;
  }

 private:
  uint8_t* At(int64_t i) const {
    return data_ + PlaceOf(meta_, strides_, i) * static_cast<int64_t>(size_);
  }

  TensorMeta meta_;
  Dims strides_;
  size_t size_;
  bool in_memory_ = false;
  std::unique_ptr<GuardBuffer<uint8_t>> memory_;
  uint8_t* data_ = nullptr;
};

// Elements that operators take: numbers that are not far from 1, codes of four
// bits, and the first rows of every table, each of them once in eight.
std::vector<uint8_t> SomeElements(Rng& rng, const TensorMeta& meta) {
  const auto count = static_cast<size_t>(CountOf(meta));
  std::vector<uint8_t> bytes(count * SizeOf(meta.dtype));
  const auto fill = [&](auto type) {
    for (size_t i = 0; i < count; ++i) {
      const auto x = FromDouble<decltype(type)>(rng.Uniform(0.25, 2));
      std::memcpy(bytes.data() + i * sizeof(x), &x, sizeof(x));
    }
  };
  switch (meta.dtype) {
    case DType::kF32:
      fill(float());
      break;
    case DType::kBF16:
      fill(BFloat16());
      break;
    case DType::kF16:
      fill(Float16());
      break;
    case DType::kI32:
    case DType::kI64:
      for (size_t i = 0; i < count; ++i) {
        bytes[i * SizeOf(meta.dtype)] = static_cast<uint8_t>(i % 8);
      }
      break;
    default:
      for (uint8_t& byte : bytes) {
        byte = static_cast<uint8_t>(rng.Integer(0, 15));
      }
  }
  return bytes;
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

  // Prepares, checks and executes. Returns the first refusal.
  absl::Status Run(const MadeOp& op, const std::vector<AnyTensorView>& views) {
    absl::Status status = op.tensors.Check(views);
    if (status.ok()) status = op.op->Prepare(views, executor_);
    if (status.ok()) status = op.CheckArgs(views);
    if (!status.ok()) return status;
    // Rows of any operator, however it counts them, are fewer.
    int64_t rows = 0;
    for (const AnyTensorView& view : views) {
      int64_t leading = view.rank() == 0 ? 0 : 1;
      for (int d = 0; d + 1 < view.rank(); ++d) leading *= view.extent(d);
      rows = std::max({rows, leading, view.rank() == 1 ? view.extent(0) : 0});
    }
    const auto bytes = op.op->WorkspaceBytes(rows, 1);
    if (!bytes.ok()) return bytes.status();
    auto memory = AlignedBuffer::Create(*bytes);
    if (!memory.ok()) return memory.status();
    op.op->Execute(views, Workspace(*memory), executor_);
    return absl::OkStatus();
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
  const OpDefinition& definition = *registry_.Find(name);
  const NamedArgs args = definition.example(dtype);
  const OpDispatcher ops(registry_, OpPolicy());
  const auto made = ops.MakeFrom(provider, name, args);
  if (!made.ok()) return;  // no kernel for these dtypes
  const auto arranged = ArrangeArgs(definition.schema, args);
  const auto returns = registry_.InferShapes(name, args);
  ASSERT_TRUE(arranged.ok() && returns.ok());
  // The tensors that are given, and where they are among all.
  std::vector<TensorMeta> metas;
  std::vector<bool> packed;
  std::vector<size_t> places;
  size_t all = 0;
  for (size_t i = 0; i < arranged->size(); ++i) {
    if (definition.schema.params[i].type != OpType::kTensor) continue;
    if (const auto* meta = std::get_if<TensorMeta>(&(*arranged)[i])) {
      metas.push_back(*meta);
      places.push_back(all);
      packed.push_back(
          PackedWeights().count({name, definition.schema.params[i].name}) > 0);
      if (packed.back()) packed_.insert(name);
    }
    ++all;
  }
  for (const TensorMeta& meta : *returns) {
    metas.push_back(meta);
    places.push_back(all++);
    packed.push_back(false);
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
