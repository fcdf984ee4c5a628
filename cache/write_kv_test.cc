#include "quern/cache/write_kv.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "absl/functional/function_ref.h"
#include "gtest/gtest.h"
#include "quern/cache/kv_layout.h"
#include "quern/cache/write_kv_testutil.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/stores.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/isa_test.h"
#include "quern/testing/many_workers.h"
#include "quern/testing/workers.h"

namespace quern {
namespace {

// Slots of pages of 32 and at least 96 tokens: single ones and padding, whole
// groups, groups cut at both ends by the call and in the middle by its tasks,
// pairs that begin at an odd slot, no order at all.
std::vector<std::vector<int64_t>> SlotPatterns(Rng& rng) {
  std::vector<int64_t> shuffled = Consecutive(0, 96);
  rng.Shuffle(shuffled);
  std::vector<int64_t> two = Consecutive(21, 65);
  for (const int64_t slot : Consecutive(66, 96)) two.push_back(slot);
  return {{},
          {-1, -9},
          {7, -1, 0, 29, 8},
          {33, 34, 35, -1, 47, 48, 49, -1, 1, 2, 70},
          Consecutive(0, 96),
          Consecutive(5, 70),
          two,
          shuffled};
}

// One instance per instruction set that this CPU has.
class WriteKvTest : public IsaTest {
 protected:
  template <typename From, typename To>
  void ExpectWritten(const WriteKvCase& c, const std::vector<From>& choices) {
    WriteKvRun<From, To> run(c, choices, rng_);
    InlineExecutor executor;
    EXPECT_TRUE(RanOn(run.Run(executor)));
  }

  // Writes in both forms, with all dims and slots.
  template <typename From, typename To>
  void ExpectAllShapesWritten(const std::vector<From>& choices,
                              KvScaling scaling = KvScaling::kNone) {
    WriteKvCase c;
    c.scaling = scaling;
    for (const KvForm form : {KvForm::kPlain, KvForm::kPaired}) {
      c.form = form;
      c.page_size = form == KvForm::kPlain ? 5 : 32;
      c.num_pages = form == KvForm::kPlain ? 20 : 3;
      c.slots = {7, -1, 0, 29, 8, 32, 33};
      for (const int64_t slot : Consecutive(46, 66)) c.slots.push_back(slot);
      for (const int64_t dim : {1, 3, 7, 8, 9, 15, 16, 17, 33, 64, 65}) {
        c.head_dim = dim;
        c.v_head_dim = dim + 1;
        ExpectWritten<From, To>(c, choices);
      }
      c.head_dim = 301;
      c.v_head_dim = 259;
      c.heads = 1;
      ExpectWritten<From, To>(c, choices);
      c.heads = 3;
      c.head_dim = 24;
      c.v_head_dim = 40;
      for (const std::vector<int64_t>& slots : SlotPatterns(rng_)) {
        c.slots = slots;
        ExpectWritten<From, To>(c, choices);
      }
      c.heads = 2;
    }
  }

  TestRng rng_;
};
QUERN_INSTANTIATE_ISA_TEST(WriteKvTest);

// What rounding can get wrong: ties on both sides, carries, the largest values
// and beyond, denormals, infinities, NaN, negative zero.
template <typename T>
std::vector<T> HardNumbers() {
  std::vector<T> v = Extremes<T>();
  for (const T x : Specials<T>()) v.push_back(x);
  for (const double x :
       {1.00390625, 1.01171875,    1.0039063,     1.0039062, 255.5,
        65504.0,    65519.99,      65520.0,       1e5,       6.1e-5,
        5.96e-8,    2.98e-8,       2.99e-8,       3.4e38,    3.395e38,
        1e-39,      1.00048828125, 1.00146484375, 0.1,       448.0,
        464.0,      480.0,         57344.0,       61440.0,   1.0625,
        1.1875,     1.125,         1.375,         0.5,       1.5,
        2.5}) {
    v.push_back(FromDouble<T>(x));
    v.push_back(FromDouble<T>(-x));
  }
  return v;
}

// Numbers of a row that may have a scale of its own.
template <typename T>
std::vector<T> Finite() {
  TestRng rng;
  std::vector<T> v = UniformReals<T>(rng, 200, -3, 3);
  for (const double x : {0.0, -0.0, 1e-3, -2.9375, 2.9375, 1e-30}) {
    v.push_back(FromDouble<T>(x));
  }
  return v;
}

TEST_P(WriteKvTest, RoundsFromF32) {
  ExpectAllShapesWritten<float, float>(HardNumbers<float>());
  ExpectAllShapesWritten<float, BFloat16>(HardNumbers<float>());
  ExpectAllShapesWritten<float, Float16>(HardNumbers<float>());
}

TEST_P(WriteKvTest, ConvertsFromBf16) {
  ExpectAllShapesWritten<BFloat16, float>(HardNumbers<BFloat16>());
  ExpectAllShapesWritten<BFloat16, BFloat16>(HardNumbers<BFloat16>());
  ExpectAllShapesWritten<BFloat16, Float16>(HardNumbers<BFloat16>());
}

TEST_P(WriteKvTest, ConvertsFromF16) {
  ExpectAllShapesWritten<Float16, float>(HardNumbers<Float16>());
  ExpectAllShapesWritten<Float16, BFloat16>(HardNumbers<Float16>());
  ExpectAllShapesWritten<Float16, Float16>(HardNumbers<Float16>());
}

TEST_P(WriteKvTest, SaturatesFp8WithoutScale) {
  ExpectAllShapesWritten<float, Float8E4M3>(HardNumbers<float>());
  ExpectAllShapesWritten<float, Float8E5M2>(HardNumbers<float>());
  ExpectAllShapesWritten<BFloat16, Float8E4M3>(HardNumbers<BFloat16>());
  ExpectAllShapesWritten<Float16, Float8E5M2>(HardNumbers<Float16>());
}

TEST_P(WriteKvTest, DividesByTheScaleOfTheTensorOrHead) {
  for (const KvScaling scaling : {KvScaling::kPerTensor, KvScaling::kPerHead}) {
    ExpectAllShapesWritten<float, int8_t>(HardNumbers<float>(), scaling);
    ExpectAllShapesWritten<BFloat16, int8_t>(Finite<BFloat16>(), scaling);
    ExpectAllShapesWritten<Float16, Float8E4M3>(HardNumbers<Float16>(),
                                                scaling);
    ExpectAllShapesWritten<BFloat16, Float8E5M2>(HardNumbers<BFloat16>(),
                                                 scaling);
  }
}

TEST_P(WriteKvTest, FindsTheScaleOfEachTokenAndHead) {
  constexpr KvScaling kOwn = KvScaling::kPerTokenHead;
  ExpectAllShapesWritten<float, int8_t>(Finite<float>(), kOwn);
  ExpectAllShapesWritten<BFloat16, int8_t>(Finite<BFloat16>(), kOwn);
  ExpectAllShapesWritten<Float16, int8_t>(Finite<Float16>(), kOwn);
  ExpectAllShapesWritten<BFloat16, Float8E4M3>(Finite<BFloat16>(), kOwn);
  ExpectAllShapesWritten<float, Float8E5M2>(Finite<float>(), kOwn);
}

// All of a row that holds a NaN or an infinity means NaN; zero and tiny rows
// have a scale.
TEST_P(WriteKvTest, GivesRowsOfNoOrdinaryNumberTheirScale) {
  WriteKvCase c;
  c.scaling = KvScaling::kPerTokenHead;
  c.slots = Consecutive(3, 60);
  for (const int64_t dim : {1, 2, 19}) {
    c.head_dim = c.v_head_dim = dim;
    ExpectWritten<float, int8_t>(c, {0.0f, -0.0f});
    ExpectWritten<float, Float8E4M3>(c, {0.0f});
    ExpectWritten<float, int8_t>(c, {0x1p-126f, 0x1p-125f, 0.0f});
    ExpectWritten<float, int8_t>(c, {3.4e38f, -1e38f, 1.0f});
    for (const float odd : {std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()}) {
      const std::vector<float> choices = {odd,  -odd, 1.0f, 2.0f, 3.0f,
                                          4.0f, 5.0f, 6.0f, 7.0f};
      ExpectWritten<float, int8_t>(c, choices);
      ExpectWritten<float, Float8E4M3>(c, choices);
      ExpectWritten<float, Float8E5M2>(c, choices);
    }
  }
}

TEST_P(WriteKvTest, RotatesKeys) {
  const auto ints = [this](auto type) {
    return SmallIntegers<decltype(type)>(rng_, 64, -8, 8);
  };
  WriteKvCase c;
  c.slots = {7, -1, 0, 29, 8, 32, 33};
  for (const int64_t slot : Consecutive(46, 66)) c.slots.push_back(slot);
  for (const KvRotation rotation : {KvRotation::kHalves, KvRotation::kPairs}) {
    c.rotation = rotation;
    for (const KvForm form : {KvForm::kPlain, KvForm::kPaired}) {
      c.form = form;
      const struct {
        int64_t head_dim, rot_dim;
      } kDims[] = {{2, 2},   {7, 4},     {16, 16},   {33, 30},
                   {64, 64}, {128, 128}, {301, 300}, {520, 514}};
      for (const auto& dims : kDims) {
        c.head_dim = dims.head_dim;
        c.rot_dim = dims.rot_dim;
        c.scaling = KvScaling::kNone;
        ExpectWritten<float, float>(c, ints(float{}));
        ExpectWritten<BFloat16, BFloat16>(c, ints(BFloat16{}));
        ExpectWritten<Float16, Float8E4M3>(c, ints(Float16{}));
        c.scaling = KvScaling::kPerTokenHead;
        ExpectWritten<BFloat16, int8_t>(c, ints(BFloat16{}));
      }
    }
  }
}

// Streaming stores need aligned blocks: of 36 and 80 elements, some are not.
TEST_P(WriteKvTest, StreamsTheSameBits) {
  WriteKvCase c;
  c.stores = Stores::kStream;
  for (const int64_t dim : {5, 36, 64, 80, 128}) {
    c.head_dim = dim;
    c.v_head_dim = dim + 4;
    c.slots = Consecutive(0, 90);
    c.scaling = KvScaling::kNone;
    ExpectWritten<float, float>(c, HardNumbers<float>());
    ExpectWritten<BFloat16, BFloat16>(c, HardNumbers<BFloat16>());
    ExpectWritten<BFloat16, Float8E4M3>(c, HardNumbers<BFloat16>());
    c.scaling = KvScaling::kPerTokenHead;
    c.slots = Consecutive(7, 90);
    ExpectWritten<BFloat16, int8_t>(c, Finite<BFloat16>());
  }
}

TEST_P(WriteKvTest, DoesNotDependOnTheNumberOfWorkers) {
  WriteKvCase c;
  c.page_size = 48;
  c.num_pages = 5;
  c.head_dim = c.v_head_dim = 24;
  c.scaling = KvScaling::kPerTokenHead;
  c.slots = Consecutive(3, 131);
  for (const int64_t slot : Consecutive(137, 230)) c.slots.push_back(slot);
  std::vector<std::vector<uint8_t>> caches;
  for (const int workers : {1, 2, 5}) {
    const auto executor = Workers(workers);
    Rng rng(1);
    WriteKvRun<float, int8_t> run(c, Finite<float>(), rng);
    EXPECT_TRUE(RanOn(run.Run(*executor)));
    caches.push_back(run.cache().ToVector());
  }
  EXPECT_EQ(caches[0], caches[1]);
  EXPECT_EQ(caches[0], caches[2]);
}

// Decode: few tokens, each in a page of its own or next to another sequence's.
TEST_P(WriteKvTest, DividesADecodeStepWithoutChangingIt) {
  WriteKvCase c;
  c.num_pages = 9;
  c.heads = 8;
  c.head_dim = c.v_head_dim = 65;
  c.scaling = KvScaling::kPerTokenHead;
  for (const int64_t slot : {40, 7, -1, 8, 33, 9, 256, 160, 161, 77, 128, 63}) {
    c.slots.push_back(slot);
  }
  for (const KvForm form : {KvForm::kPaired, KvForm::kPlain}) {
    c.form = form;
    std::vector<uint8_t> alone;
    for (const int workers : {1, 2, 3, 64}) {
      ManyWorkers executor(workers);
      Rng rng(1);
      WriteKvRun<BFloat16, int8_t> run(c, Finite<BFloat16>(), rng);
      EXPECT_TRUE(RanOn(run.Run(executor)));
      if (workers == 1) alone = run.cache().ToVector();
      EXPECT_EQ(run.cache().ToVector(), alone) << workers;
    }
  }
}

// An executor that counts the tasks of the last call.
class TaskCounter final : public Executor {
 public:
  explicit TaskCounter(int workers) : workers_(workers) {}
  int num_workers() const override { return workers_; }
  void ParallelFor(int64_t num_tasks,
                   absl::FunctionRef<void(int64_t, int)> fn) override {
    tasks = num_tasks;
    inline_.ParallelFor(num_tasks, fn);
  }

  int64_t tasks = 0;

 private:
  int workers_;
  InlineExecutor inline_;
};

TEST_P(WriteKvTest, GivesAllWorkersAPartOfADecodeStep) {
  WriteKvCase c;
  c.num_pages = 16;
  c.heads = 8;
  c.head_dim = c.v_head_dim = 128;
  for (int64_t s = 0; s < 16; ++s) c.slots.push_back(s * 32 + 5 * s % 32);
  const auto tasks = [&](int workers) {
    TaskCounter executor(workers);
    Rng rng(1);
    WriteKvRun<BFloat16, BFloat16> run(c, Finite<BFloat16>(), rng);
    EXPECT_TRUE(RanOn(run.Run(executor)));
    return executor.tasks;
  };
  EXPECT_EQ(tasks(1), 1);
  EXPECT_GE(tasks(2), 2);
  EXPECT_GE(tasks(8), 8);
  c.slots = {5};
  EXPECT_EQ(tasks(8), 1) << "2048 elements are not worth a fork";
}

}  // namespace
}  // namespace quern
