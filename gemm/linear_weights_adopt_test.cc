// Packed bytes that are adopted: from a file that two processes map, without a
// copy, and refused by name if they are damaged.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "quern/core/check.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/gemm/linear_weights.h"
#include "quern/gemm/testing/run.h"
#include "quern/gemm/testing/weights.h"
#include "quern/gemm/weights/packed_form.h"
#include "quern/testing/compare.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"
#include "quern/testing/no_alloc.h"
#include "quern/testing/refusal.h"

namespace quern {
namespace {

using BF = BFloat16;
using Header = PackedHeader;
using Bytes = std::vector<uint8_t>;

// Packed forms of these have a multiple of 64 bytes, so that a guard page may
// follow their last one.
constexpr int64_t kN = 80, kK = 96, kM = 3;

constexpr WeightCase kBF16{WeightFormat::kBF16, WeightLayout::kNK};
constexpr WeightCase kE4M3{WeightFormat::kE4M3Block, WeightLayout::kNK};
constexpr WeightCase kI4{WeightFormat::kI4Group, WeightLayout::kNK, true, true};

// Owns mapped pages of memory or of a file.
class Mapping {
 public:
  explicit Mapping(size_t size)
      : Mapping(size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1) {}
  Mapping(size_t size, int protection, int flags, int fd) : size_(size) {
    data_ = mmap(nullptr, size, protection, flags, fd, 0);
    QUERN_CHECK(data_ != MAP_FAILED);
  }
  ~Mapping() { munmap(data_, size_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  void Protect(int64_t begin, int64_t end, int protection) {
    QUERN_CHECK(mprotect(data() + begin, static_cast<size_t>(end - begin),
                         protection) == 0);
  }
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }
  absl::Span<const uint8_t> bytes() const { return {data(), size_}; }

 private:
  size_t size_;
  void* data_;
};

class PackedFile {
 public:
  explicit PackedFile(absl::Span<const uint8_t> bytes) : size_(bytes.size()) {
    path_ = testing::TempDir() + "/packed_weights_XXXXXX";
    const int fd = mkstemp(path_.data());
    QUERN_CHECK(fd >= 0);
    QUERN_CHECK(write(fd, bytes.data(), size_) == static_cast<ssize_t>(size_));
    QUERN_CHECK(close(fd) == 0);
  }
  ~PackedFile() { unlink(path_.c_str()); }

  // Maps the file for reading alone and returns c of a layer on its weights.
  std::vector<float> Run(const std::vector<BF>& a) const {
    const int fd = open(path_.c_str(), O_RDONLY);
    QUERN_CHECK(fd >= 0);
    const Mapping mapped(size_, PROT_READ, MAP_SHARED, fd);
    QUERN_CHECK(close(fd) == 0);
    const auto weights = LinearWeights::Adopt(mapped.bytes());
    QUERN_CHECK(weights.ok());
    return RunPacked(*weights, kM, a);
  }

 private:
  size_t size_;
  std::string path_;
};

// Calls `fn` in a new process, which then exits: with 0 unless the test failed.
pid_t Fork(const std::function<void()>& fn) {
  std::fflush(nullptr);
  const pid_t child = fork();
  QUERN_CHECK(child >= 0);
  if (child > 0) return child;
  fn();
  std::fflush(nullptr);
  _exit(testing::Test::HasFailure() ? 1 : 0);
}

TEST(LinearWeightsAdoptTest, TwoProcessesRunOneFile) {
  TestRng rng;
  for (const WeightCase& c : kWeightCases) {
    for (const bool gated : {false, true}) {
      SCOPED_TRACE(testing::Message() << c << (gated ? ", gated" : ""));
      const LinearWeights packed = RealSources(rng, c, kN, kK).Pack(gated);
      const auto a = UniformReals<BF>(rng, kM * kK);
      const auto want = RunPacked(packed, kM, a);
      const PackedFile file(packed.bytes());
      const size_t size = want.size() * sizeof(float);
      const Mapping results(2 * size);
      pid_t children[2];
      for (size_t i = 0; i < 2; ++i) {
        children[i] = Fork([&] {
          std::memcpy(results.data() + i * size, file.Run(a).data(), size);
        });
      }
      for (size_t i = 0; i < 2; ++i) {
        int status = -1;
        EXPECT_EQ(waitpid(children[i], &status, 0), children[i]);
        EXPECT_EQ(status, 0) << "process " << i;
        std::vector<float> got(want.size());
        std::memcpy(got.data(), results.data() + i * size, size);
        EXPECT_TRUE(AllBitsEqual(got, want)) << "process " << i;
      }
    }
  }
}

// Adopt and Create may touch the header and the order of k alone: the other
// pages are out of bounds until the layer runs.
TEST(LinearWeightsAdoptTest, CopiesNothing) {
  TestRng rng;
  const int64_t page = sysconf(_SC_PAGESIZE);
  for (const WeightCase& c : kWeightCases) {
    SCOPED_TRACE(testing::Message() << c);
    const LinearWeights packed = RealSources(rng, c, kN, kK).Pack();
    const auto size = static_cast<int64_t>(packed.bytes().size());
    Mapping mapping(packed.bytes().size());
    std::memcpy(mapping.data(), packed.bytes().data(), packed.bytes().size());
    mapping.Protect(page, size, PROT_NONE);
    if (packed.order() != nullptr) {
      const int64_t order = reinterpret_cast<const uint8_t*>(packed.order()) -
                            packed.bytes().data();
      mapping.Protect(order / page * page, order + kK * 4, PROT_READ);
    }
    auto adopted = LinearWeights::Adopt(mapping.bytes());
    ASSERT_TRUE(adopted.ok()) << adopted.status();
    if (packed.order() == nullptr) {
      EXPECT_NO_ALLOCATION(adopted = LinearWeights::Adopt(mapping.bytes()));
    }
    EXPECT_EQ(adopted->bytes().data(), mapping.data());
    EXPECT_EQ(adopted->bytes().size(), mapping.bytes().size());
    EXPECT_EQ(adopted->panels() - mapping.data(),
              packed.panels() - packed.bytes().data());
    EXPECT_EQ(adopted->has_bias(), packed.has_bias());
    EXPECT_EQ(adopted->spec().group_size, packed.spec().group_size);
    const auto plan = PackedPlan(*adopted, SpecOf<BF, float>());

    mapping.Protect(0, size, PROT_READ);
    InlineExecutor executor;
    const auto a = UniformReals<BF>(rng, kM * kK);
    EXPECT_TRUE(AllBitsEqual(RunLinear<BF, float>(plan, {kM}, a, executor),
                             RunPacked(packed, kM, a)));
  }
}

// Bytes that end at a guard page if their size lets them be aligned there, and
// begin at one otherwise.
class Damaged {
 public:
  explicit Damaged(const Bytes& bytes, int64_t shift = 0)
      : memory_(bytes,
                bytes.size() % LinearWeights::kAlignment == 0 && shift == 0
                    ? Edge::kEnd
                    : Edge::kBegin,
                shift) {}
  absl::StatusOr<LinearWeights> Adopt() const {
    return LinearWeights::Adopt(
        {memory_.data(), static_cast<size_t>(memory_.size())});
  }

 private:
  GuardBuffer<uint8_t> memory_;
};

class LinearWeightsDamageTest : public testing::Test {
 protected:
  Bytes Pack(const WeightCase& c, bool gated = false) {
    return BytesOf(RealSources(rng_, c, kN, kK).Pack(gated));
  }
  static Header HeaderOf(const Bytes& bytes) {
    Header header;
    std::memcpy(&header, bytes.data(), sizeof(header));
    return header;
  }
  static Bytes WithHeader(Bytes bytes, const Header& header) {
    std::memcpy(bytes.data(), &header, sizeof(header));
    return bytes;
  }
  static void Refuse(const Bytes& bytes, const std::string& words,
                     int64_t shift = 0) {
    const absl::Status status = Damaged(bytes, shift).Adopt().status();
    ExpectRefusal(status, "linear_weights: ");
    ExpectRefusal(status, words);
  }
  // `change(header)` alters fields; then the checksum is made true again.
  template <typename Change>
  void RefuseHeader(const Bytes& bytes, const std::string& words,
                    const Change& change) {
    Header header = HeaderOf(bytes);
    change(header);
    header.checksum = HeaderChecksum(header);
    Refuse(WithHeader(bytes, header), words);
  }

  TestRng rng_;
};

TEST_F(LinearWeightsDamageTest, AnyFieldOfTheHeader) {
  const Bytes bytes = Pack(kI4);
  EXPECT_EQ(Damaged(bytes).Adopt().status(), absl::OkStatus());
  const auto refuse = [&](const std::string& words, auto change) {
    RefuseHeader(bytes, words, change);
  };
  refuse("no packed weights", [](Header& h) { h.magic[0] = 'q'; });
  refuse("version=1; need 2", [](Header& h) { h.version = 1; });
  refuse("version=3; need 2", [](Header& h) { h.version = 3; });
  refuse("byte_order=67305985; need 16909060",
         [](Header& h) { h.byte_order = 0x04030201; });
  refuse("header_bytes=128; need 256", [](Header& h) { h.header_bytes = 128; });
  refuse("format=8; need 0 <= format <= 7", [](Header& h) { h.format = 8; });
  for (const int64_t n :
       {INT64_MIN, int64_t{-1}, int64_t{0}, int64_t{1} << 31, INT64_MAX}) {
    const std::string value = std::to_string(n);
    refuse("n=" + value + "; need 1 <= n", [&](Header& h) { h.n = n; });
    refuse("k=" + value + "; need 1 <= k", [&](Header& h) { h.k = n; });
    refuse("total_bytes=" + value + "; need ",
           [&](Header& h) { h.total_bytes = n; });
    if (n >= 1) continue;
    refuse("group_size=" + value, [&](Header& h) { h.group_size = n; });
  }
  refuse("n=81 is odd", [](Header& h) {
    h.n = 81;
    h.gated = 1;
  });
  refuse("group_size=24; need a multiple of 16",
         [](Header& h) { h.group_size = 24; });
  refuse("group_size=97; need 96", [](Header& h) { h.group_size = 97; });
  refuse("gated=2; need 0 <= gated <= 1", [](Header& h) { h.gated = 2; });
  refuse("flags=15", [](Header& h) { h.flags = 15; });
  refuse("reserved bytes", [](Header& h) { h.reserved[0] = 1; });
  refuse("reserved bytes",
         [](Header& h) { h.reserved[sizeof(h.reserved) - 1] = 0x80; });
  // A format that has no blocks, and a format of blocks that there is not.
  refuse("reserved bytes", [](Header& h) { h.block_format = 2; });
  refuse("block_format=0; need one of ", [](Header& h) { h.format = 7; });
  // Headers of weights that have another size.
  refuse("total_bytes=", [](Header& h) { h.total_bytes += 4096; });
  refuse("total_bytes=", [](Header& h) { h.n += 4096; });
  refuse("total_bytes=", [](Header& h) { h.k += 4096; });
  refuse("total_bytes=", [](Header& h) {
    h.format = 0;
    h.group_size = 0;
    h.flags = Header::kBias;
  });
  for (const uint32_t flag : {Header::kZeros, Header::kOrder, Header::kBias}) {
    refuse("total_bytes=", [&](Header& h) { h.flags &= ~flag; });
  }
  refuse("2^63 bytes", [](Header& h) {
    h.format = static_cast<uint32_t>(WeightFormat::kF32);
    h.n = h.k = LinearWeights::kMaxExtent;
    h.group_size = 0;
    h.flags = 0;
  });
  Header header = HeaderOf(bytes);
  header.checksum ^= 1;
  Refuse(WithHeader(bytes, header), "checksum");

  RefuseHeader(Pack(kBF16), "group_size=32; need 0",
               [](Header& h) { h.group_size = 32; });
  for (const uint32_t flag : {Header::kZeros, Header::kOrder}) {
    RefuseHeader(Pack(kE4M3), "e4m3_block has none",
                 [&](Header& h) { h.flags |= flag; });
  }
  RefuseHeader(Pack({WeightFormat::kI8Channel, WeightLayout::kNK}),
               "k=131072; need 1 <= k <= 131071",
               [](Header& h) { h.k = 131072; });
}

TEST_F(LinearWeightsDamageTest, AnotherSize) {
  for (const WeightCase& c : kFormatCases) {
    SCOPED_TRACE(testing::Message() << c);
    const Bytes bytes = Pack(c);
    const auto cut = [&](size_t size) {
      return Bytes(bytes.begin(), bytes.begin() + static_cast<int64_t>(size));
    };
    for (const size_t size : {0, 1, 100, 255}) {
      Refuse(cut(size),
             "bytes=" + std::to_string(size) + "; need bytes >= 256");
    }
    for (const size_t size :
         {size_t{256}, size_t{4096}, bytes.size() - 64, bytes.size() - 1}) {
      Refuse(cut(size), "bytes=" + std::to_string(size) + "; need " +
                            std::to_string(bytes.size()));
    }
    Bytes longer = bytes;
    longer.push_back(0);
    Refuse(longer, "bytes=" + std::to_string(longer.size()));
  }
}

TEST_F(LinearWeightsDamageTest, AnotherAddress) {
  const Bytes bytes = Pack(kBF16);
  for (const int64_t shift : {1, 4, 32}) {
    Refuse(bytes, "begin " + std::to_string(shift) + " beyond a multiple of 64",
           shift);
  }
}

TEST_F(LinearWeightsDamageTest, AnOrderThatIsNone) {
  const LinearWeights packed = RealSources(rng_, kI4, kN, kK).Pack();
  const int64_t order =
      reinterpret_cast<const uint8_t*>(packed.order()) - packed.bytes().data();
  for (const int64_t i : {int64_t{0}, int64_t{17}, kK - 1}) {
    const int32_t twice = packed.order()[(i + 1) % kK];
    for (const int32_t k :
         {twice, -1, static_cast<int32_t>(kK), INT32_MIN, INT32_MAX}) {
      Bytes bytes = BytesOf(packed);
      std::memcpy(bytes.data() + order + i * 4, &k, sizeof(k));
      Refuse(bytes, "order[");
      if (k != twice) {
        Refuse(bytes, "order[" + std::to_string(i) + "]=" + std::to_string(k) +
                          "; need ");
      }
    }
  }
}

TEST_F(LinearWeightsDamageTest, AnyBitOfTheHeader) {
  for (const WeightCase& c : kFormatCases) {
    Bytes bytes = Pack(c);
    for (size_t bit = 0; bit < 8 * sizeof(Header); ++bit) {
      bytes[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
      ExpectRefusal(Damaged(bytes).Adopt().status(), "linear_weights: ");
      bytes[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    }
  }
}

// A header of other weights that have as many bytes is no damage that can be
// seen, but nothing outside these bytes is read.
TEST_F(LinearWeightsDamageTest, AnyBitUnderATrueChecksum) {
  constexpr size_t kBits = 8 * offsetof(Header, checksum);
  for (const WeightCase& c : kFormatCases) {
    for (const bool gated : {false, true}) {
      const Bytes bytes = Pack(c, gated);
      int adopted = 0;
      for (size_t bit = 0; bit < kBits; ++bit) {
        SCOPED_TRACE(testing::Message() << c << ", bit " << bit);
        Bytes damaged = bytes;
        damaged[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
        Header header = HeaderOf(damaged);
        header.checksum = HeaderChecksum(header);
        const Damaged memory(WithHeader(damaged, header));
        const auto weights = memory.Adopt();
        if (!weights.ok()) {
          ExpectRefusal(weights.status(), "linear_weights: ");
          continue;
        }
        ++adopted;
        const LinearWeightsSpec& spec = weights->spec();
        EXPECT_EQ(spec.n, header.n);
        EXPECT_EQ(spec.k, header.k);
        EXPECT_EQ(spec.group_size, header.group_size);
        EXPECT_EQ(spec.gated, header.gated == 1);
        EXPECT_EQ(static_cast<uint32_t>(spec.format), header.format);
        EXPECT_TRUE(header.n != kN || header.k != kK ||
                    header.gated != uint32_t{gated} ||
                    header.format != HeaderOf(bytes).format ||
                    header.group_size != HeaderOf(bytes).group_size);
        RunPacked(*weights, kM, UniformReals<BF>(rng_, kM * spec.k));
      }
      EXPECT_LE(adopted, 16);
    }
  }
}

}  // namespace
}  // namespace quern
