// Every operator with two tensors in one memory, one of which it writes: at one
// address, or so that one begins in the last element of the other. A pair that
// is not declared in place (OpRules) is refused. A declared pair is refused or
// gives the bits that tensors in memory of their own give. Lists of indices are
// refused by the operator's own CheckArgs as well, because a plan in C++ checks
// them once and reads them again while it writes.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
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
#include "quern/testing/guard_buffer.h"

namespace quern {
namespace {

bool IsIndex(const TensorMeta& meta) {
  return meta.dtype == DType::kI32 || meta.dtype == DType::kI64;
}

int64_t BytesOf(const TensorMeta& meta) {
  return CountOf(meta) * static_cast<int64_t>(SizeOf(meta.dtype));
}

AnyTensorView DenseView(const TensorMeta& meta, uint8_t* data) {
  AnyTensorView::Dims extents{};
  std::copy(meta.extents.begin(), meta.extents.end(), extents.begin());
  return AnyTensorView(meta.dtype, static_cast<void*>(data),
                       static_cast<int>(meta.extents.size()), extents,
                       DenseStrides(meta.extents));
}

class AllOpsOverlapTest : public testing::Test {
 protected:
  AllOpsOverlapTest() {
    EXPECT_EQ(RegisterAllOps(registry_), absl::OkStatus());
  }

  void TryAll(const std::string& name, const std::string& provider,
              DType dtype);
  // Tensor `other` begins `offset` bytes behind tensor `written`.
  void Try(const std::string& name, const std::string& provider,
           const NamedArgs& args, const GivenTensors& given, size_t written,
           size_t other, int64_t offset);

  OpRegistry registry_;
  InlineExecutor executor_;
  Rng rng_{20261127};
  // What was executed in place.
  std::set<std::string> executed_;
  int64_t refused_ = 0;
};

void AllOpsOverlapTest::Try(const std::string& name,
                            const std::string& provider, const NamedArgs& args,
                            const GivenTensors& given, size_t written,
                            size_t other, int64_t offset) {
  const OpDispatcher ops(registry_, OpPolicy());
  const MadeOp op = *ops.MakeFrom(provider, name, args);
  std::vector<Tensor> tensors;
  for (const TensorMeta& meta : given.metas) {
    tensors.emplace_back(meta, DenseStrides(meta.extents), 0);
    tensors.back().Write(SomeElements(rng_, meta));
  }
  const TensorMeta &w = given.metas[written], &o = given.metas[other];
  // A multiple of 64 bytes begins aligned.
  GuardBuffer<uint8_t> memory((std::max(BytesOf(w), offset + BytesOf(o)) + 63) /
                              64 * 64);
  const auto fill = [&](size_t t, int64_t at) {
    const std::vector<uint8_t> dense = tensors[t].Read();
    std::copy(dense.begin(), dense.end(), memory.data() + at);
  };
  fill(written, 0);
  fill(other, offset);
  std::vector<AnyTensorView> views(given.all), apart(given.all);
  const auto share = [&](size_t t, int64_t at) {
    views[given.places[t]] = DenseView(given.metas[t], memory.data() + at);
    // Memory of its own has what the shared memory has.
    tensors[t].Write(
        {memory.data() + at, memory.data() + at + BytesOf(given.metas[t])});
  };
  for (size_t t = 0; t < given.size(); ++t) {
    apart[given.places[t]] = tensors[t].View(false, false);
    views[given.places[t]] = apart[given.places[t]];
  }
  share(written, 0);
  share(other, offset);
  std::vector<std::vector<uint8_t>> contents;
  for (const Tensor& tensor : tensors) contents.push_back(tensor.Read());

  const OpRules& rules = registry_.Find(name)->rules;
  bool declared = false;
  for (const auto& [a, b] : rules.in_place) {
    const std::set<std::string> pair = {a, b};
    declared = declared || pair == std::set<std::string>{given.names[written],
                                                         given.names[other]};
  }
  const std::vector<uint8_t> before(memory.data(),
                                    memory.data() + memory.size());
  const absl::Status status = op.CheckArgs(views);
  if (!declared) {
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_TRUE(absl::StartsWith(status.message(), name + ": ")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), " overlaps ")) << status;
    ++refused_;
    if (IsIndex(o)) {
      EXPECT_FALSE(op.op->CheckArgs(views).ok());
    }
    return;
  }
  if (!RunStep(op, views, executor_).ok()) {
    EXPECT_TRUE(std::equal(before.begin(), before.end(), memory.data()));
    return;
  }
  executed_.insert(name + ": " + given.names[other] + ", " +
                   given.names[written]);
  for (size_t t = 0; t < given.size(); ++t) tensors[t].Write(contents[t]);
  const MadeOp again = *ops.MakeFrom(provider, name, args);
  ASSERT_EQ(RunStep(again, apart, executor_), absl::OkStatus());
  const std::vector<uint8_t> want = tensors[written].Read();
  EXPECT_TRUE(std::equal(want.begin(), want.end(), memory.data()));
}

void AllOpsOverlapTest::TryAll(const std::string& name,
                               const std::string& provider, DType dtype) {
  const NamedArgs args = registry_.Find(name)->example(dtype);
  if (!OpDispatcher(registry_, OpPolicy())
           .MakeFrom(provider, name, args)
           .ok()) {
    return;  // no kernel for these dtypes
  }
  const auto given = GivenTensors::Of(registry_, name, args);
  ASSERT_TRUE(given.ok()) << given.status();
  for (size_t w = 0; w < given->size(); ++w) {
    if (!given->written[w]) continue;
    for (size_t o = 0; o < given->size(); ++o) {
      if (o == w) continue;
      const auto size = static_cast<int64_t>(SizeOf(given->metas[o].dtype));
      const int64_t last = (BytesOf(given->metas[w]) - 1) / size * size;
      for (const int64_t offset : std::set<int64_t>{0, last}) {
        SCOPED_TRACE(name + " of " + provider + ", " +
                     std::string(DTypeName(dtype)) + ": " + given->names[o] +
                     " " + std::to_string(offset) + " bytes behind " +
                     given->names[w]);
        Try(name, provider, args, *given, w, o, offset);
      }
    }
  }
}

TEST_F(AllOpsOverlapTest, WhatIsWrittenLiesApartUnlessItIsDeclaredInPlace) {
  for (const std::string& name : registry_.Names()) {
    for (const auto& made : registry_.Find(name)->implementations) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        TryAll(name, made.provider, dtype);
        if (HasFatalFailure()) return;
      }
    }
  }
  EXPECT_GT(refused_, 1000);
  // Every declaration whose tensors an example has is of use.
  std::set<std::string> declared;
  for (const std::string& name : registry_.Names()) {
    const OpDefinition& op = *registry_.Find(name);
    const auto given =
        GivenTensors::Of(registry_, name, op.example(DType::kF32));
    ASSERT_TRUE(given.ok()) << given.status();
    const auto find = [&](const std::string& tensor) -> const TensorMeta* {
      for (size_t t = 0; t < given->size(); ++t) {
        if (given->names[t] == tensor) return &given->metas[t];
      }
      return nullptr;
    };
    for (const auto& [a, b] : op.rules.in_place) {
      const TensorMeta *one = find(a), *two = find(b);
      // A dense result is not where half of a wider tensor is.
      if (one == nullptr || two == nullptr || !(*one == *two)) continue;
      declared.insert(name + ": " + a + ", " + b);
    }
  }
  for (const std::string& pair : declared) {
    // These read the slots of a step that agrees with itself.
    if (absl::StrContains(pair, "k_buffer")) continue;
    EXPECT_EQ(executed_.count(pair), 1u) << pair;
  }
}

}  // namespace
}  // namespace quern
