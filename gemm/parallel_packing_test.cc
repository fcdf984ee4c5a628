// Weights that are codes are read by the tasks of the executor alone: neither
// codes nor scales nor zero points are copied by the caller by itself, which on
// a machine of many cores would take longer than all else.

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "core/check.h"
#include "core/dtype.h"
#include "core/executor.h"
#include "core/tensor_view.h"
#include "gemm/fp8_block_linear.h"
#include "gemm/int4_linear.h"
#include "gtest/gtest.h"
#include "testing/data.h"
#include "testing/many_workers.h"

namespace quern {
namespace {

constexpr int64_t kN = 328, kK = 704, kGroup = 64;
constexpr int64_t kGroups = kK / kGroup;
constexpr int kWorkers = 8;

// Pages that may be touched only while they are open.
class Sealed {
 public:
  explicit Sealed(const std::vector<uint8_t>& bytes) : bytes_(bytes.size()) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    QUERN_CHECK(data_ != MAP_FAILED);
    std::memcpy(data_, bytes.data(), bytes_);
    Protect(PROT_NONE);
  }
  ~Sealed() { munmap(data_, bytes_); }
  Sealed(const Sealed&) = delete;
  Sealed& operator=(const Sealed&) = delete;

  void Open() { Protect(PROT_READ); }
  void Close() { Protect(PROT_NONE); }
  template <typename T>
  AnyTensorView Matrix(DType dtype, int64_t rows) const {
    const int64_t cols = static_cast<int64_t>(bytes_ / sizeof(T)) / rows;
    return AnyTensorView(dtype, static_cast<const void*>(data_), 2,
                         {rows, cols}, {cols, 1});
  }

 private:
  void Protect(int protection) {
    QUERN_CHECK(mprotect(data_, bytes_, protection) == 0);
  }
  size_t bytes_;
  void* data_;
};

// Opens the weights while its tasks run.
class Opener final : public Executor {
 public:
  explicit Opener(std::initializer_list<Sealed*> weights) : weights_(weights) {}
  int num_workers() const override { return many_.num_workers(); }
  void ParallelFor(int64_t num_tasks,
                   absl::FunctionRef<void(int64_t, int)> fn) override {
    EXPECT_GE(num_tasks, num_workers());
    for (Sealed* w : weights_) w->Open();
    many_.ParallelFor(num_tasks, fn);
    for (Sealed* w : weights_) w->Close();
  }

 private:
  ManyWorkers many_{kWorkers};
  std::vector<Sealed*> weights_;
};

std::vector<uint8_t> Bytes(Rng& rng, int64_t count, int64_t most) {
  std::vector<uint8_t> bytes(static_cast<size_t>(count));
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(rng.Integer(0, most));
  return bytes;
}

class ParallelPackingTest : public testing::Test {
 protected:
  // A plan whose tasks alone may read the weights. The death of the test is
  // what shows a copy by the caller.
  void Create(Int4Format format, bool zeros) {
    SCOPED_TRACE(Int4FormatName(format));
    TestRng rng;
    Int4LinearSpec spec;
    spec.format = format;
    spec.n = kN;
    spec.k = kK;
    spec.group_size = kGroup;
    Int4Weights weights;
    if (format == Int4Format::kQ4_0 || format == Int4Format::kQ8_0) {
      spec.group_size = 32;
      const int64_t block = format == Int4Format::kQ4_0 ? 18 : 34;
      Sealed codes(Bytes(rng, kN * kK / 32 * block, 59));
      weights.codes = codes.Matrix<uint8_t>(DType::kU8, kN);
      Opener executor({&codes});
      const auto plan = Int4LinearPlan::Create(spec, weights, {}, executor);
      EXPECT_EQ(plan.status(), absl::OkStatus());
      return;
    }
    const bool plain = format == Int4Format::kPlain;
    const int64_t word = plain ? 1 : 2;  // codes to a byte
    Sealed codes(Bytes(rng, kN * kK / word, 15));
    Sealed scales(Bytes(rng, kGroups * kN * 4, 62));
    Sealed points(Bytes(rng, kGroups * kN / word, 15));
    weights.codes =
        plain ? codes.Matrix<uint8_t>(DType::kU8, kN)
              : codes.Matrix<int32_t>(DType::kI32,
                                      format == Int4Format::kAwq ? kK : kK / 8);
    weights.scales = scales.Matrix<float>(DType::kF32, kGroups);
    if (zeros) {
      weights.zeros = plain ? points.Matrix<uint8_t>(DType::kU8, kGroups)
                            : points.Matrix<int32_t>(DType::kI32, kGroups);
    }
    Opener executor({&codes, &scales, &points});
    const auto plan = Int4LinearPlan::Create(spec, weights, {}, executor);
    EXPECT_EQ(plan.status(), absl::OkStatus());
  }
};

TEST_F(ParallelPackingTest, TasksAloneReadGgufBlocks) {
  Create(Int4Format::kQ4_0, false);
  Create(Int4Format::kQ8_0, false);
}

TEST_F(ParallelPackingTest, TasksAloneReadCodesAndScales) {
  Create(Int4Format::kAwq, false);
  Create(Int4Format::kGptq, false);
}

TEST_F(ParallelPackingTest, TasksAloneReadZeroPoints) {
  Create(Int4Format::kAwq, true);
  Create(Int4Format::kGptq, true);
  Create(Int4Format::kGptqV2, true);
}

TEST_F(ParallelPackingTest, TasksAloneCheckPlainCodes) {
  Create(Int4Format::kPlain, true);
}

TEST_F(ParallelPackingTest, TasksAloneReadFp8BlocksAndTheirScales) {
  TestRng rng;
  Fp8BlockLinearSpec spec;
  spec.n = kN;
  spec.k = kK;
  spec.block_n = spec.block_k = 64;
  Sealed codes(Bytes(rng, kN * kK, 126));
  Sealed scales(Bytes(rng, 6 * kGroups * 4, 62));
  Opener executor({&codes, &scales});
  const auto plan = Fp8BlockLinearPlan::Create(
      spec, codes.Matrix<uint8_t>(DType::kF8E4M3, kN),
      scales.Matrix<float>(DType::kF32, 6), {}, executor);
  EXPECT_EQ(plan.status(), absl::OkStatus());
}

// Workers run the last task first, so that the one that finds the first code is
// not the first to find any.
TEST_F(ParallelPackingTest, TheFirstCodeAbove15IsNamed) {
  TestRng rng;
  Int4LinearSpec spec;
  spec.format = Int4Format::kPlain;
  spec.n = kN;
  spec.k = kK;
  spec.group_size = kGroup;
  std::vector<uint8_t> codes = Bytes(rng, kN * kK, 15);
  codes[7 * kK + 5] = 16;
  codes[7 * kK + 6] = 17;
  codes[300 * kK] = 255;
  const auto scales = UniformReals<float>(rng, kGroups * kN);
  Int4Weights weights;
  weights.codes = DenseMatrix(codes.data(), kN, kK);
  weights.scales = DenseMatrix(scales.data(), kGroups, kN);
  ManyWorkers executor(kWorkers);
  const auto plan = Int4LinearPlan::Create(spec, weights, {}, executor);
  EXPECT_EQ(plan.status().message(),
            "int4_linear: codes[7, 5]=16; need 15 or less");
}

}  // namespace
}  // namespace quern
