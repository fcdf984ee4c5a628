// Patches of images that lie further apart than oneDNN can say: its strides are
// 32-bit numbers of bytes.

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/conv/conv.h"
#include "quern/ops/conv/conv_extents.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"

namespace quern {
namespace {

constexpr int64_t kApart = int64_t{1} << 29;

// Two images of f32, of a page at most each, kApart elements apart. Only these
// two pages take memory.
class FarImages {
 public:
  FarImages() {
    void* const all = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all != MAP_FAILED) data_ = static_cast<float*>(all);
  }
  ~FarImages() {
    if (data_ != nullptr) munmap(data_, kBytes);
  }
  FarImages(const FarImages&) = delete;
  FarImages& operator=(const FarImages&) = delete;

  bool ok() const { return data_ != nullptr; }
  float* image(int64_t i) { return data_ + i * kApart; }
  // [2, channels, 1, 1, width]
  AnyTensorView view(int64_t channels, int64_t width) {
    return AnyTensorView(DType::kF32, static_cast<void*>(data_), 5,
                         {2, channels, 1, 1, width},
                         {kApart, width, width, width, 1});
  }

 private:
  static constexpr size_t kBytes = size_t{kApart} * 4 + 4096;
  float* data_ = nullptr;
};

class ConvFarImagesTest : public IsaTest {};
QUERN_INSTANTIATE_ISA_TEST(ConvFarImagesTest);

TEST_P(ConvFarImagesTest, AreCopied) {
  constexpr int64_t kChannels = 3, kWidth = 2, kOut = 5;
  GuardBuffer<float> weight(kOut * kChannels * kWidth);
  for (int64_t i = 0; i < weight.size(); ++i) {
    weight[i] = static_cast<float>(i % 5 - 2);
  }
  ConvSpec spec;
  spec.in_channels = kChannels;
  spec.out_channels = kOut;
  spec.kernel = spec.stride = {1, 1, kWidth};
  InlineExecutor executor;
  for (const std::string kernels : {"packed", "onednn"}) {
    SCOPED_TRACE(kernels);
    spec.kernels = kernels;
    const auto plan =
        ConvPlan::Create(spec,
                         DenseTensor<const float, 5>(
                             weight.data(), {kOut, kChannels, 1, 1, kWidth}),
                         AnyTensorView(), executor);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->implementation(), std::string("patches"));
    if (kernels == "packed") {
      EXPECT_RAN_ON(*plan);
    }
    FarImages in, out;
    ASSERT_TRUE(in.ok() && out.ok());
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t i = 0; i < kChannels * kWidth; ++i) {
        in.image(b)[i] = static_cast<float>(b * 10 + i - 3);
      }
    }
    const auto bytes = plan->WorkspaceBytes(2, {1, 1, kWidth}, 1);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    GuardBuffer<float> memory(*bytes / 4);
    const AnyTensorView x = in.view(kChannels, kWidth), y = out.view(kOut, 1);
    ASSERT_EQ(plan->CheckArgs(x, y), absl::OkStatus());
    plan->Execute(x, y, Workspace(memory.data(), static_cast<size_t>(*bytes)),
                  executor);
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t o = 0; o < kOut; ++o) {
        float want = 0;
        for (int64_t i = 0; i < kChannels * kWidth; ++i) {
          want += weight[o * kChannels * kWidth + i] * in.image(b)[i];
        }
        EXPECT_EQ(out.image(b)[o], want) << "image " << b << ", output " << o;
      }
    }
  }
}

}  // namespace
}  // namespace quern
