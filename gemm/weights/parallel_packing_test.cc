// Sources are read by the tasks of the executor alone: the caller copies
// neither codes nor scales nor zero points by itself, which on a machine of
// many cores would take longer than all else.

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/known_weights.h"
#include "quern/gemm/testing/weights.h"
#include "quern/testing/data.h"
#include "quern/testing/many_workers.h"

namespace quern {
namespace {

constexpr int64_t kN = 328, kK = 704, kGroup = 64;
constexpr int kWorkers = 8;
// A task of packing/vnni_pack.h is about 128 KiB, of which there are fewer.
constexpr int kVnniWorkers = 4;

// A copy of a dense matrix or vector, in pages that may be touched only while
// they are open.
class Sealed {
 public:
  explicit Sealed(const AnyTensorView& from) : view_(from) {
    if (from.rank() == 0) return;
    const int64_t rows = from.rank() == 1 ? 1 : from.extent(0);
    bytes_ = static_cast<size_t>(rows * from.extent(from.rank() - 1)) *
             SizeOf(from.dtype());
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    QUERN_CHECK(data_ != MAP_FAILED);
    std::memcpy(data_, from.data(), bytes_);
    view_ = AnyTensorView(from.dtype(), static_cast<const void*>(data_),
                          from.rank(), {from.extent(0), from.extent(1)},
                          {from.stride(0), from.stride(1)});
    Protect(PROT_NONE);
  }
  ~Sealed() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  Sealed(const Sealed&) = delete;
  Sealed& operator=(const Sealed&) = delete;

  void Protect(int protection) {
    QUERN_CHECK(data_ == nullptr || mprotect(data_, bytes_, protection) == 0);
  }
  const AnyTensorView& view() const { return view_; }

 private:
  AnyTensorView view_;
  size_t bytes_ = 0;
  void* data_ = nullptr;
};

// Opens the weights while its tasks run.
class Opener final : public Executor {
 public:
  Opener(std::deque<Sealed>& weights, int workers)
      : many_(workers), weights_(weights) {}
  int num_workers() const override { return many_.num_workers(); }
  void ParallelFor(int64_t num_tasks,
                   absl::FunctionRef<void(int64_t, int)> fn) override {
    EXPECT_GE(num_tasks, num_workers());
    for (Sealed& w : weights_) w.Protect(PROT_READ);
    many_.ParallelFor(num_tasks, fn);
    for (Sealed& w : weights_) w.Protect(PROT_NONE);
  }

 private:
  ManyWorkers many_;
  std::deque<Sealed>& weights_;
};

// The death of this test is what shows a copy by the caller.
void PackSealed(const WeightCase& c, const std::vector<int64_t>& columns) {
  SCOPED_TRACE(testing::Message() << c << " " << columns.size() << " sources");
  TestRng rng;
  std::deque<WeightSources> random;
  std::deque<Sealed> sealed;
  std::vector<LinearSource> sources;
  const auto seal = [&](AnyTensorView& view) {
    sealed.emplace_back(view);
    view = sealed.back().view();
  };
  for (const int64_t n : columns) {
    random.push_back(RealSources(rng, c, n, kK, kGroup));
    LinearSource source = random.back().All();
    seal(source.codes);
    seal(source.zeros);
    // One scale for each column of int8 is little.
    if (c.format != WeightFormat::kI8Channel) seal(source.scales);
    source.g_idx = random.front().All().g_idx;
    sources.push_back(source);
  }
  LinearWeightsSpec spec = random.front().Spec();
  spec.n = kN;
  const bool groups = c.format >= WeightFormat::kE4M3Block;
  Opener executor(sealed, groups ? kWorkers : kVnniWorkers);
  EXPECT_EQ(LinearWeights::Pack(spec, sources, executor).status(),
            absl::OkStatus());
}

TEST(ParallelPackingTest, TasksAloneReadTheSources) {
  for (const WeightCase& c : kWeightCases) {
    PackSealed(c, {kN});
    PackSealed(c, {136, 192});  // they meet inside a panel
  }
}

// Workers run the last task first, so that the one that finds the first code is
// not the first to find any.
TEST(ParallelPackingTest, TheFirstCodeAbove15IsNamed) {
  TestRng rng;
  const WeightSources random = RealSources(
      rng, {WeightFormat::kI4Group, WeightLayout::kNK}, kN, kK, kGroup);
  std::vector<uint8_t> codes(kN * kK);
  codes[7 * kK + 5] = 16;
  codes[7 * kK + 6] = 17;
  codes[300 * kK] = 255;
  LinearSource source = random.All();
  source.codes = DenseMatrix(codes.data(), kN, kK);
  ManyWorkers executor(kWorkers);
  EXPECT_EQ(
      LinearWeights::Pack(random.Spec(), {source}, executor).status().message(),
      "linear_weights: sources[0].codes[7, 5]=16; need 15 or less");
}

}  // namespace
}  // namespace quern
