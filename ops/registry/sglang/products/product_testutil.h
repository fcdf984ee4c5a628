#ifndef QUERN_OPS_REGISTRY_SGLANG_PRODUCTS_PRODUCT_TESTUTIL_H_
#define QUERN_OPS_REGISTRY_SGLANG_PRODUCTS_PRODUCT_TESTUTIL_H_

// Fixture of tests of SGLang's products by name: a call takes tensors that own
// their memory, and returns others.

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/bound_rows.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_tensors.h"
#include "quern/ops/registry/sglang/products/product_ops.h"
#include "quern/ops/registry/sglang/sglang_ops.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/reference_convert.h"

namespace quern {

// A tensor and its bytes. Rows have `gap` elements between them.
struct OwnTensor {
  TensorMeta meta;
  std::vector<uint8_t> bytes;
  int64_t gap = 0;
  bool turned = false;  // the first two dimensions lie the other way round

  OwnTensor() = default;
  explicit OwnTensor(TensorMeta of, int64_t gap_between = 0)
      : meta(std::move(of)), gap(gap_between) {
    bytes.resize(static_cast<size_t>(Strides()[0] * Extent(0)) *
                 SizeOf(meta.dtype));
  }
  template <typename T>
  static OwnTensor Of(const std::vector<T>& values,
                      std::vector<int64_t> extents, int64_t gap = 0) {
    OwnTensor tensor({DTypeOf<T>, std::move(extents)}, gap);
    const int64_t n = tensor.meta.extents.back();
    for (size_t i = 0; i < values.size(); ++i) {
      const auto at =
          static_cast<size_t>(static_cast<int64_t>(i) / n * (n + gap) +
                              static_cast<int64_t>(i) % n);
      reinterpret_cast<T*>(tensor.bytes.data())[at] = values[i];
    }
    return tensor;
  }

  int64_t Extent(size_t d) const {
    return meta.extents.empty() ? 1 : meta.extents[d];
  }
  AnyTensorView::Dims Strides() const {
    AnyTensorView::Dims strides{};
    int64_t stride = 1;
    for (size_t d = meta.extents.size(); d-- > 0;) {
      strides[d] = stride;
      stride =
          stride * meta.extents[d] + (d + 1 == meta.extents.size() ? gap : 0);
    }
    if (turned) {
      const int64_t row = strides[1];
      strides[0] = row;
      strides[1] = row * meta.extents[0];
    }
    return strides;
  }
  AnyTensorView view() {
    AnyTensorView::Dims extents{};
    for (size_t d = 0; d < meta.extents.size(); ++d) extents[d] = Extent(d);
    return AnyTensorView(meta.dtype, static_cast<void*>(bytes.data()),
                         static_cast<int>(meta.extents.size()), extents,
                         Strides());
  }
  // The elements of a tensor of floats.
  std::vector<double> doubles() {
    const AnyTensorView v = view();
    std::vector<double> values;
    for (int64_t r = 0; r < RowsOf(v); ++r) {
      for (int64_t i = 0; i < meta.extents.back(); ++i) {
        values.push_back(static_cast<double>(ScalarRow(v, r)[i]));
      }
    }
    return values;
  }
};

using NamedOwn = std::vector<std::pair<std::string, OwnTensor*>>;

class SglangProductsTest : public IsaTest {
 protected:
  SglangProductsTest() {
    EXPECT_EQ(RegisterSglangPackOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterSglangLinearOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterSglangProductOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterSglangLatentOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterSglangEmbedOps(registry_), absl::OkStatus());
    EXPECT_EQ(RegisterSglangPack4Ops(registry_), absl::OkStatus());
  }

  // Makes, prepares and runs an operator on three workers, in exactly the
  // workspace that it asks for. Returns what it returns.
  std::vector<OwnTensor> Call(const std::string& provider, const char* op,
                              const NamedOwn& tensors, NamedArgs args = {}) {
    for (const auto& [name, tensor] : tensors) {
      args.emplace_back(name, tensor->meta);
    }
    const OpDispatcher ops(registry_, OpPolicy());
    auto made = ops.MakeFrom(provider, op, args);
    EXPECT_TRUE(made.ok()) << made.status();
    const auto shapes = registry_.InferShapes(op, args);
    EXPECT_TRUE(shapes.ok()) << shapes.status();
    if (!made.ok() || !shapes.ok()) return {};
    if (provider == "simd") {
      EXPECT_RAN_ON(*made->op);
    }
    std::vector<OwnTensor> outs;
    for (const TensorMeta& meta : *shapes) outs.emplace_back(meta, gap_);
    std::vector<std::pair<std::string, AnyTensorView>> views;
    for (const auto& [name, tensor] : tensors) {
      views.emplace_back(name, tensor->view());
    }
    for (size_t i = 0; i < outs.size(); ++i) {
      views.emplace_back(outs.size() == 1 ? "out" : "out" + std::to_string(i),
                         outs[i].view());
    }
    const std::vector<NamedTensor> named(views.begin(), views.end());
    std::vector<AnyTensorView> ordered;
    EXPECT_EQ(made->tensors.Arrange(named, ordered), absl::OkStatus());
    EXPECT_EQ(made->op->Prepare(ordered, executor_), absl::OkStatus());
    EXPECT_EQ(made->CheckArgs(ordered), absl::OkStatus());
    const auto bytes = made->WorkspaceBytes(ordered, executor_.num_workers());
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    if (!bytes.ok()) return {};
    auto memory = AlignedBuffer::Create(*bytes);
    EXPECT_TRUE(memory.ok());
    const Workspace workspace(memory->data(), static_cast<size_t>(*bytes));
    made->op->Execute(ordered, workspace, executor_);
    return outs;
  }
  // What packs, and returns dense tensors.
  std::vector<OwnTensor> CallDense(const char* op, const NamedOwn& tensors,
                                   NamedArgs args = {}) {
    const int64_t gap = std::exchange(gap_, 0);
    auto outs = Call("reference", op, tensors, std::move(args));
    gap_ = gap;
    return outs;
  }
  // What SGLang's packing makes of a weight.
  OwnTensor Packed(OwnTensor& weight,
                   const char* op = "convert_weight_packed") {
    return CallDense(op, {{"weight", &weight}})[0];
  }

  OpRegistry registry_;
  ManyWorkers executor_{3};
  int64_t gap_ = 3;  // of results
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_SGLANG_PRODUCTS_PRODUCT_TESTUTIL_H_
