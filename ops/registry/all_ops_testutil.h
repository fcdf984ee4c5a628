#ifndef QUERN_OPS_REGISTRY_ALL_OPS_TESTUTIL_H_
#define QUERN_OPS_REGISTRY_ALL_OPS_TESTUTIL_H_

// Test utility: the tensors of any operator by name, in memory that shows what
// is written where, and a step with exactly the workspace that it asks for.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_schema.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/reference_convert.h"

namespace quern {

inline AnyTensorView::Dims DenseStrides(const std::vector<int64_t>& extents) {
  AnyTensorView::Dims strides{};
  int64_t stride = 1;
  for (size_t d = extents.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= extents[d];
  }
  return strides;
}

inline int64_t CountOf(const TensorMeta& meta) {
  int64_t count = 1;
  for (const int64_t extent : meta.extents) count *= extent;
  return count;
}

// The place of element i, in row-major order, in a view of these strides.
inline int64_t PlaceOf(const TensorMeta& meta,
                       const AnyTensorView::Dims& strides, int64_t i) {
  int64_t place = 0;
  for (size_t d = meta.extents.size(); d-- > 0;) {
    place += i % meta.extents[d] * strides[d];
    i /= meta.extents[d];
  }
  return place;
}

// A tensor in memory of its own, between the elements of which is poison.
class Tensor {
 public:
  using Dims = AnyTensorView::Dims;
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
inline std::vector<uint8_t> SomeElements(Rng& rng, const TensorMeta& meta) {
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

// The tensors that an operator is given, in the order of its schema and then
// the returned ones.
struct GivenTensors {
  static absl::StatusOr<GivenTensors> Of(const OpRegistry& registry,
                                         const std::string& op,
                                         const NamedArgs& args) {
    const OpSchema& schema = registry.Find(op)->schema;
    QUERN_ASSIGN_OR_RETURN(const std::vector<OpArg> arranged,
                           ArrangeArgs(schema, args));
    QUERN_ASSIGN_OR_RETURN(const std::vector<TensorMeta> returns,
                           registry.InferShapes(op, args));
    const std::vector<std::string> names = OpTensors::NamesOf(schema);
    GivenTensors given;
    for (size_t i = 0; i < arranged.size(); ++i) {
      if (schema.params[i].type != OpType::kTensor) continue;
      if (const auto* meta = std::get_if<TensorMeta>(&arranged[i])) {
        given.Add(*meta, names[given.all], schema.params[i].mutated);
      }
      ++given.all;
    }
    for (const TensorMeta& meta : returns) {
      given.Add(meta, names[given.all], /*is_written=*/true);
      ++given.all;
    }
    return given;
  }

  size_t size() const { return metas.size(); }

  std::vector<TensorMeta> metas;
  std::vector<std::string> names;
  std::vector<bool> written;
  std::vector<size_t> places;  // among all tensors
  size_t all = 0;

 private:
  void Add(const TensorMeta& meta, const std::string& name, bool is_written) {
    metas.push_back(meta);
    names.push_back(name);
    written.push_back(is_written);
    places.push_back(all);
  }
};

// Prepares, checks and executes. Returns the first refusal. A write behind the
// workspace ends the test.
inline absl::Status RunStep(const MadeOp& op,
                            const std::vector<AnyTensorView>& views,
                            Executor& executor) {
  QUERN_RETURN_IF_ERROR(op.Prepare(views, executor));
  QUERN_RETURN_IF_ERROR(op.CheckArgs(views));
  QUERN_ASSIGN_OR_RETURN(const int64_t bytes,
                         op.WorkspaceBytes(views, executor.num_workers()));
  if (bytes == 0) {
    op.op->Execute(views, executor);
    return absl::OkStatus();
  }
  GuardBuffer<uint8_t> memory((bytes + 63) / 64 * 64);
  op.op->Execute(views, Workspace(memory.data(), static_cast<size_t>(bytes)),
                 executor);
  return absl::OkStatus();
}

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_ALL_OPS_TESTUTIL_H_
