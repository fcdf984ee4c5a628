#include "quern/packing/vnni_pack.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/packing/vnni_layout.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

constexpr int64_t kNeverStream = int64_t{1} << 62;

// One problem; n and k of the plain matrix in either order.
struct Case {
  int64_t n;
  int64_t k;
  WeightOrder order;
  int64_t pad = 0;    // elements between the rows
  int64_t shift = 0;  // elements from the alignment of the guard page
  Edge edge = Edge::kEnd;
  int64_t stream_from_bytes = kNeverStream;

  int64_t rows() const { return order == WeightOrder::kNK ? n : k; }
  int64_t cols() const { return order == WeightOrder::kNK ? k : n; }
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << (c.order == WeightOrder::kNK ? "[N, K]" : "[K, N]")
             << " n=" << c.n << " k=" << c.k << " pad=" << c.pad
             << " shift=" << c.shift
             << " edge=" << (c.edge == Edge::kEnd ? "end" : "begin")
             << (c.stream_from_bytes == 0 ? " streamed" : "");
}

template <typename T>
class BytesOf {
 public:
  explicit BytesOf(T value) { std::memcpy(bytes_, &value, sizeof(T)); }
  uint8_t operator[](size_t i) const { return bytes_[i]; }

 private:
  uint8_t bytes_[sizeof(T)];
};

// Random bits: every byte value in every place, NaNs and signs included.
template <typename T>
std::vector<T> RandomBits(Rng& rng, int64_t count) {
  std::vector<T> v(static_cast<size_t>(count));
  for (T& x : v) {
    const uint64_t bits = rng.Next();
    std::memcpy(&x, &bits, sizeof(T));
  }
  return v;
}

// The formula of vnni_layout.h, byte by byte, padding included.
template <typename T>
std::vector<uint8_t> Formula(const VnniLayout& layout, const Case& c,
                             const std::vector<T>& dense) {
  std::vector<uint8_t> want;
  for (int64_t p = 0; p < layout.panels(); ++p)
    for (int64_t l = 0; l < layout.lines(); ++l)
      for (int64_t col = 0; col < 16; ++col)
        for (int64_t i = 0; i < layout.v(); ++i) {
          const int64_t k = l * layout.v() + i, n = p * 16 + col;
          const int64_t at =
              c.order == WeightOrder::kNK ? n * c.k + k : k * c.n + n;
          for (size_t b = 0; b < sizeof(T); ++b) {
            want.push_back(k < c.k && n < c.n
                               ? BytesOf<T>(dense[static_cast<size_t>(at)])[b]
                               : 0);
          }
        }
  return want;
}

class VnniPackTest : public IsaTest {
 protected:
  // Packs c, compares every byte with the formula, unpacks, compares again.
  template <typename T>
  void ExpectPacksAndUnpacks(Rng& rng, const Case& c, Executor& executor) {
    SCOPED_TRACE(testing::Message() << DTypeName(DTypeOf<T>) << " " << c);
    const auto layout = VnniLayout::Create(DTypeOf<T>, c.k, c.n);
    ASSERT_TRUE(layout.ok()) << layout.status();
    VnniPackSpec spec;
    spec.layout = *layout;
    spec.order = c.order;
    spec.stream_from_bytes = c.stream_from_bytes;
    const auto plan = VnniPackPlan::Create(spec);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);

    const std::vector<T> dense = RandomBits<T>(rng, c.n * c.k);
    const StridedMatrix<T> plain(dense, c.rows(), c.cols(), c.cols() + c.pad,
                                 c.edge, c.shift);
    GuardBuffer<uint8_t> packed(layout->bytes(), c.edge);
    ASSERT_EQ(plan->CheckArgs(plain.view(), packed.data()), absl::OkStatus());
    const PackedView view = plan->Pack(plain.view(), packed.data(), executor);
    EXPECT_EQ(view.layout(), *layout);
    EXPECT_EQ(view.data(), packed.data());

    const std::vector<uint8_t> want = Formula(*layout, c, dense);
    for (size_t i = 0; i < want.size(); ++i) {
      if (packed[static_cast<int64_t>(i)] == want[i]) continue;  // fast
      ASSERT_EQ(+packed[static_cast<int64_t>(i)], +want[i])
          << "byte " << i << " of " << want.size();
    }

    StridedMatrix<T> back(c.rows(), c.cols(), c.cols() + c.pad, c.edge,
                          c.shift);
    plan->Unpack(view, back.view(), executor);
    const std::vector<T> actual = back.ToDense();
    ASSERT_EQ(
        std::memcmp(actual.data(), dense.data(), dense.size() * sizeof(T)), 0);
  }

  template <typename T>
  void ExpectPacksEveryRemainder() {
    std::vector<int64_t> ns, ks;
    for (int64_t n = 1; n <= 33; ++n) ns.push_back(n);
    for (const int64_t n : {47, 48, 49, 53, 64, 67}) ns.push_back(n);
    for (int64_t k = 1; k <= 9; ++k) ks.push_back(k);
    for (const int64_t k : {31, 32, 33, 63, 64, 65, 101}) ks.push_back(k);
    TestRng rng;
    InlineExecutor inline_executor;
    // Every stride modulo 4, every misalignment, both edges, both stores: each
    // meets each remainder of n and of k, not each pair of remainders.
    int64_t i = 0;
    for (const WeightOrder order : {WeightOrder::kNK, WeightOrder::kKN}) {
      for (const int64_t n : ns) {
        for (const int64_t k : ks) {
          Case c{n, k, order};
          c.pad = i % 5;
          c.shift = i % 7;
          c.edge = i % 3 == 0 ? Edge::kBegin : Edge::kEnd;
          c.stream_from_bytes = i % 2 == 0 ? 0 : kNeverStream;
          ExpectPacksAndUnpacks<T>(rng, c, inline_executor);
          if (HasFatalFailure()) return;
          ++i;
        }
      }
    }
  }
};
QUERN_INSTANTIATE_ISA_TEST(VnniPackTest);

TEST_P(VnniPackTest, PacksEveryRemainderOfBf16) {
  ExpectPacksEveryRemainder<BFloat16>();
}

TEST_P(VnniPackTest, PacksEveryRemainderOfF16) {
  ExpectPacksEveryRemainder<Float16>();
}

TEST_P(VnniPackTest, PacksEveryRemainderOfF32) {
  ExpectPacksEveryRemainder<float>();
}

TEST_P(VnniPackTest, PacksEveryRemainderOfInt8) {
  ExpectPacksEveryRemainder<int8_t>();
}

TEST_P(VnniPackTest, PacksAcrossTilesOnManyThreads) {
  TestRng rng;
  const auto pool = HwyExecutor::Create(3, HwyExecutor::Sharing::kAll);
  ASSERT_TRUE(pool.ok()) << pool.status();
  for (const WeightOrder order : {WeightOrder::kNK, WeightOrder::kKN}) {
    for (const int64_t stream_from_bytes : {int64_t{0}, kNeverStream}) {
      for (const int64_t n : {37, 4133}) {
        Case c{n, n == 37 ? 4139 : 133, order};
        c.pad = 3;
        c.shift = 1;
        c.stream_from_bytes = stream_from_bytes;
        ExpectPacksAndUnpacks<BFloat16>(rng, c, **pool);
        ExpectPacksAndUnpacks<int8_t>(rng, c, **pool);
      }
    }
  }
}

// A weight of one layer inside a larger tensor: rows at a power of two.
TEST_P(VnniPackTest, PacksRowsThatShareACacheSet) {
  TestRng rng;
  InlineExecutor executor;
  for (const WeightOrder order : {WeightOrder::kNK, WeightOrder::kKN}) {
    Case c{80, 80, order};
    c.pad = 4096 - 80;
    c.stream_from_bytes = 0;
    ExpectPacksAndUnpacks<BFloat16>(rng, c, executor);
    ExpectPacksAndUnpacks<int8_t>(rng, c, executor);
  }
}

TEST_P(VnniPackTest, OrdersAgree) {
  TestRng rng;
  InlineExecutor executor;
  const int64_t n = 35, k = 71;
  const std::vector<int8_t> nk = RandomBits<int8_t>(rng, n * k);
  std::vector<int8_t> kn(nk.size());
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < k; ++j)
      kn[static_cast<size_t>(j * n + i)] = nk[static_cast<size_t>(i * k + j)];

  VnniPackSpec spec;
  spec.layout = *VnniLayout::Create(DType::kI8, k, n);
  const auto from_nk = VnniPackPlan::Create(spec);
  spec.order = WeightOrder::kKN;
  const auto from_kn = VnniPackPlan::Create(spec);
  ASSERT_TRUE(from_nk.ok() && from_kn.ok());
  EXPECT_RAN_ON(*from_nk);
  GuardBuffer<uint8_t> a(spec.layout.bytes()), b(spec.layout.bytes());
  from_nk->Pack(DenseMatrix(nk.data(), n, k), a.data(), executor);
  from_kn->Pack(DenseMatrix(kn.data(), k, n), b.data(), executor);
  EXPECT_EQ(a.ToVector(), b.ToVector());
}

TEST_P(VnniPackTest, AllocatesNothing) {
  TestRng rng;
  InlineExecutor executor;
  for (const WeightOrder order : {WeightOrder::kNK, WeightOrder::kKN}) {
    VnniPackSpec spec;
    spec.layout = *VnniLayout::Create(DType::kBF16, 131, 49);
    spec.order = order;
    const auto plan = VnniPackPlan::Create(spec);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    std::vector<BFloat16> plain = RandomBits<BFloat16>(rng, 131 * 49);
    const MatrixView<BFloat16> view = order == WeightOrder::kNK
                                          ? DenseMatrix(plain.data(), 49, 131)
                                          : DenseMatrix(plain.data(), 131, 49);
    GuardBuffer<uint8_t> packed(spec.layout.bytes());
    EXPECT_NO_ALLOCATION(plan->Pack(view, packed.data(), executor));
    EXPECT_NO_ALLOCATION(
        plan->Unpack({spec.layout, packed.data()}, view, executor));
  }
}

void ExpectRefusal(const absl::Status& status, const std::string& words) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_NE(std::string(status.message()).find(words), std::string::npos)
      << status << "\nlacks: " << words;
}

TEST(VnniPackPlanTest, RefusesABadSpec) {
  VnniPackSpec spec;
  ExpectRefusal(VnniPackPlan::Create(spec).status(),
                "vnni_pack: layout is empty");
  spec.layout = *VnniLayout::Create(DType::kI8, 8, 16);
  spec.stream_from_bytes = -1;
  ExpectRefusal(VnniPackPlan::Create(spec).status(),
                "stream_from_bytes=-1; need stream_from_bytes >= 0");
}

TEST(VnniPackPlanTest, RefusesBadArguments) {
  alignas(64) int8_t packed[2 * 64 + 1] = {};
  int8_t w[8 * 32] = {};
  BFloat16 bf16[8 * 16] = {};
  VnniPackSpec spec;
  spec.layout = *VnniLayout::Create(DType::kI8, 8, 16);
  const auto plan = VnniPackPlan::Create(spec);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const MatrixView<int8_t> good = DenseMatrix(w, 16, 8);
  EXPECT_EQ(plan->CheckArgs(good, packed), absl::OkStatus());

  ExpectRefusal(plan->CheckArgs(DenseMatrix(bf16, 16, 8), packed),
                "w is bf16; need i8");
  ExpectRefusal(plan->CheckArgs(DenseVector(w, 16), packed), "rank of w=1");
  ExpectRefusal(plan->CheckArgs(DenseMatrix(w, 15, 8), packed), "n=15");
  ExpectRefusal(plan->CheckArgs(DenseMatrix(w, 16, 9), packed), "k=9");
  // Whether w may be written or not: Pack, which reads it, must not depend on
  // that.
  for (const int64_t stride : {0, 7}) {
    const MatrixView<int8_t> overlapping(w, {16, 8}, {stride, 1});
    const std::string words =
        absl::StrCat("w has stride ", stride,
                     " in dimension 0; need 8 or more, as its elements must "
                     "not overlap");
    ExpectRefusal(plan->CheckArgs(overlapping, packed), words);
    ExpectRefusal(
        plan->CheckArgs(MatrixView<const int8_t>(overlapping), packed), words);
  }
  ExpectRefusal(plan->CheckArgs(AnyTensorView(DType::kI8, static_cast<void*>(w),
                                              2, {16, 8}, {16, 2}),
                                packed),
                "w has stride 2 in dimension 1; need 1");
  ExpectRefusal(plan->CheckArgs(good, nullptr), "packed is null");
  ExpectRefusal(plan->CheckArgs(good, packed + 1),
                "packed is 1 bytes past a cache line; need alignment 64");

  ExpectRefusal(
      plan->CheckArgs(MatrixView<const int8_t>(w + 128, {16, 8}, {-8, 1}),
                      packed),
      "w has stride -8 in dimension 0; need 0 or more");
  ExpectRefusal(plan->CheckArgs(DenseMatrix<int8_t>(nullptr, 16, 8), packed),
                "w is null");
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 2;
  ExpectRefusal(
      plan->CheckArgs(MatrixView<const int8_t>(w, {16, 8}, {kHuge, 1}), packed),
      "need fewer than 2^63 bytes");
  ExpectRefusal(plan->CheckArgs(DenseMatrix(packed, 16, 8), packed),
                "packed overlaps w; need no element in common");
  ExpectRefusal(plan->CheckArgs(DenseMatrix(packed + 127, 16, 8), packed),
                "packed overlaps w");

  spec.order = WeightOrder::kKN;
  const auto kn = VnniPackPlan::Create(spec);
  ASSERT_TRUE(kn.ok()) << kn.status();
  ExpectRefusal(kn->CheckArgs(good, packed), "k=16");
  EXPECT_EQ(kn->CheckArgs(DenseMatrix(w, 8, 16), packed), absl::OkStatus());
}

// A matrix of one column, such as the transpose of one row, has no element
// beside another in a row: its last stride is not used.
TEST_P(VnniPackTest, IgnoresTheLastStrideOfOneColumn) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  TestRng rng;
  InlineExecutor executor;
  for (const WeightOrder order : {WeightOrder::kNK, WeightOrder::kKN}) {
    const bool nk = order == WeightOrder::kNK;
    VnniPackSpec spec;
    spec.layout = *VnniLayout::Create(DType::kBF16, nk ? 1 : 37, nk ? 37 : 1);
    spec.order = order;
    const auto plan = VnniPackPlan::Create(spec);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    std::vector<BFloat16> plain = RandomBits<BFloat16>(rng, 37);
    GuardBuffer<uint8_t> want(spec.layout.bytes());
    plan->Pack(DenseMatrix(plain.data(), 37, 1), want.data(), executor);
    for (const int64_t stride : {int64_t{37}, int64_t{0}, kHuge, -kHuge}) {
      const AnyTensorView column(DType::kBF16, static_cast<void*>(plain.data()),
                                 2, {37, 1}, {1, stride});
      GuardBuffer<uint8_t> packed(spec.layout.bytes());
      ASSERT_EQ(plan->CheckArgs(column, packed.data()), absl::OkStatus());
      plan->Pack(column, packed.data(), executor);
      EXPECT_EQ(packed.ToVector(), want.ToVector());
      plan->Unpack({spec.layout, packed.data()}, column, executor);
    }
  }
}

// A row that is alone has no next one: its stride is not used, not even in a
// product that would overflow.
TEST_P(VnniPackTest, IgnoresTheRowStrideOfOneRow) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  TestRng rng;
  InlineExecutor executor;
  for (const WeightOrder order : {WeightOrder::kNK, WeightOrder::kKN}) {
    const bool nk = order == WeightOrder::kNK;
    VnniPackSpec spec;
    spec.layout = *VnniLayout::Create(DType::kBF16, nk ? 37 : 1, nk ? 1 : 37);
    spec.order = order;
    const auto plan = VnniPackPlan::Create(spec);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_RAN_ON(*plan);
    std::vector<BFloat16> plain = RandomBits<BFloat16>(rng, 37);
    GuardBuffer<uint8_t> want(spec.layout.bytes());
    plan->Pack(DenseMatrix(plain.data(), 1, 37), want.data(), executor);
    for (const int64_t stride : {kHuge, -kHuge, int64_t{0}}) {
      const MatrixView<BFloat16> row(plain.data(), {1, 37}, {stride, 1});
      GuardBuffer<uint8_t> packed(spec.layout.bytes());
      ASSERT_EQ(plan->CheckArgs(row, packed.data()), absl::OkStatus());
      plan->Pack(row, packed.data(), executor);
      EXPECT_EQ(packed.ToVector(), want.ToVector());
      plan->Unpack({spec.layout, packed.data()}, row, executor);
    }
  }
}

}  // namespace
}  // namespace quern
