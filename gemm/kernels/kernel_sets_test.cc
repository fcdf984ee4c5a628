// The lists of kernels, row by row: each names its instruction set, and tiles
// of a set give a row the bits that the set claims.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "hwy/detect_targets.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/avx_vnni.h"
#include "quern/core/dtype.h"
#include "quern/core/isa.h"
#include "quern/gemm/kernels/block_kernels.h"
#include "quern/gemm/kernels/codes_kernels.h"
#include "quern/gemm/kernels/exact_block_kernels.h"
#include "quern/gemm/kernels/i4_block_kernels.h"
#include "quern/gemm/kernels/int8_kernels.h"
#include "quern/gemm/kernels/linear_kernels.h"
#include "quern/gemm/kernels/tile.h"
#include "quern/gemm/weights/block_traits.h"
#include "quern/gemm/weights/code_type.h"
#include "quern/packing/block_panels.h"
#include "quern/quant/block_format.h"
#include "quern/testing/data.h"
#include "quern/testing/emulate_avx_vnni_int8.h"

namespace quern {
namespace {

constexpr size_t kCols = 16;        // of a panel
constexpr size_t kPanels = 8;       // of the widest tile
constexpr size_t kBytes = 1 << 15;  // of a panel, at most

// Bits that are finite and of a moderate size in f32, bf16, f16 and e4m3, and
// any integer.
AlignedBuffer FiniteBytes(TestRng& rng, size_t bytes) {
  AlignedBuffer buffer =
      AlignedBuffer::Create(static_cast<int64_t>(bytes)).value();
  for (size_t i = 0; i < bytes; ++i) {
    const auto any = static_cast<unsigned>(rng.Integer(0, 255));
    const unsigned bits = i % 2 == 0 ? any & 0xBF : (any & 0x83) | 0x38;
    buffer.data()[i] = static_cast<uint8_t>(bits);
  }
  return buffer;
}

// How the tiles of a table find rows and panels.
struct TileForm {
  size_t row_words;
  size_t panel_bytes;
  size_t steps;
  const I4Groups* groups = nullptr;
};

using Sums = std::vector<uint32_t>;  // the bits of f32 or i32

class TilesTest : public testing::Test {
 protected:
  // One tile, from the first row and the first panel on.
  static Sums Run(Tile tile, const TileForm& form, const uint32_t* a,
                  const uint8_t* b, size_t rows, size_t panels) {
    Sums sums(rows * panels * kCols, 0x7FC00000u);
    TileArgs args = {};
    args.a = a;
    args.b = b;
    args.panel_bytes = form.panel_bytes;
    args.steps = form.steps;
    args.sums = sums.data();
    args.sums_stride = panels * kCols;
    args.prefetch_steps = 1;
    args.groups = form.groups;
    tile(args);
    return sums;
  }

  const uint32_t* row(const TileForm& form, size_t r) const {
    return rows_.data<uint32_t>() + r * form.row_words;
  }
  const uint8_t* panel(const TileForm& form, size_t p) const {
    return panels_.data() + p * form.panel_bytes;
  }

  // Each row of each tile, at its place there, has the bits that it has alone.
  void ExpectAlike(const TileTable& table, const TileForm& form) {
    if (table.max_rows == 0) return;  // there are no such tiles
    ASSERT_LE(table.max_rows * form.row_words * sizeof(uint32_t),
              rows_.bytes());
    ASSERT_LE(kPanels * form.panel_bytes, panels_.bytes());
    ASSERT_NE(table.tiles[1][0], nullptr);
    std::vector<Sums> alone;
    for (size_t r = 0; r < table.max_rows; ++r) {
      for (size_t p = 0; p < kPanels; ++p) {
        alone.push_back(
            Run(table.tiles[1][0], form, row(form, r), panel(form, p), 1, 1));
      }
    }
    for (size_t rows = 1; rows <= table.max_rows; ++rows) {
      for (size_t log = 0; log < 4; ++log) {
        const Tile tile = table.tiles[rows][log];
        if (tile == nullptr) continue;
        ++tiles_;
        const size_t panels = size_t{1} << log;
        ASSERT_LE(panels, table.panels[rows]);
        const Sums sums =
            Run(tile, form, row(form, 0), panel(form, 0), rows, panels);
        for (size_t r = 0; r < rows; ++r) {
          for (size_t p = 0; p < panels; ++p) {
            const auto begin =
                sums.begin() + static_cast<ptrdiff_t>((r * panels + p) * kCols);
            EXPECT_TRUE(std::equal(begin, begin + kCols,
                                   alone[r * kPanels + p].begin()))
                << "row " << r << " panel " << p << " of a tile of " << rows
                << " x " << panels;
          }
        }
      }
    }
  }

  // Tiles of f32 or i32 lines.
  void ExpectLinesAlike(const TileTable& table, size_t words_per_line) {
    for (const size_t steps : {size_t{1}, size_t{37}}) {
      ExpectAlike(table, {PackedRowPitch(words_per_line), kBytes, steps});
    }
  }

  // Tiles of one table give the bits of those of another: b_of_other is what
  // panel 0 becomes for these.
  void ExpectSame(const TileTable& table, const TileForm& form,
                  const TileTable& other, const TileForm& other_form,
                  const void* b_of_other) {
    if (table.max_rows == 0) return;
    EXPECT_EQ(Run(table.tiles[1][0], form, row(form, 0), panel(form, 0), 1, 1),
              Run(other.tiles[1][0], other_form, row(form, 0),
                  static_cast<const uint8_t*>(b_of_other), 1, 1))
        << "decoded elsewhere";
  }

  // Each row of a list names its instruction set, and gives what its targets
  // need. Returns those that run here.
  template <class Set, class... Spec>
  std::vector<Set> SetsThatRun(absl::Span<const Set> sets, Spec... spec) {
    std::vector<Isa> listed;
    std::vector<Set> run;
    for (const Set& set : sets) {
      if (set.get == nullptr) continue;
      listed.push_back(set.isa);
      if (!set.runs()) continue;
      EXPECT_STREQ(set.get(spec...).target, set.isa.name());
      EXPECT_NE(set.get(spec...).sums, TileSums::kPerTile)
          << "is a set that no test walks";
      run.push_back(set);
    }
    for (size_t i = 1; i < listed.size(); ++i) {
      EXPECT_LE(listed[i - 1].highway, listed[i].highway) << listed[i].name();
      EXPECT_NE(listed[i - 1], Isa{listed[i].highway}) << "hides a leaf";
    }
    for (const Isa& isa : CompiledIsas()) {
      EXPECT_LE(std::count(listed.begin(), listed.end(), isa), 1) << isa.name();
      EXPECT_TRUE(isa.leaf != IsaLeaf::kNone ||
                  std::any_of(listed.begin(), listed.end(),
                              [&](const Isa& one) {
                                return StandsFor(one.name(), isa.name());
                              }))
          << isa.name();
    }
    EXPECT_FALSE(run.empty());
    return run;
  }

  TestRng rng_;
  AlignedBuffer rows_ = FiniteBytes(rng_, 1 << 16);
  AlignedBuffer panels_ = FiniteBytes(rng_, kPanels* kBytes);
  int tiles_ = 0;
};

// The sets of AVX-512 that a list has, best first.
template <class Set>
std::string Avx512(absl::Span<const Set> sets) {
  std::string names;
  for (const Set& set : sets) {
    if (set.get == nullptr || set.isa.highway > HWY_AVX3) continue;
    names += (names.empty() ? "" : " ") + std::string(set.isa.name());
  }
  return names;
}

// One that has lost a set still computes, more slowly.
TEST(KernelSetsTest, HaveTheSetsOfAvx512WhoseInstructionsTheyUse) {
  constexpr int64_t kAll = HWY_AVX3 | HWY_AVX3_DL | HWY_AVX3_ZEN4;
  if ((HWY_TARGETS & kAll) != kAll) GTEST_SKIP() << "not compiled for all";
  EXPECT_EQ(Avx512(LinearKernelSetsBF16()), "AVX3_ZEN4 AVX3");
  EXPECT_EQ(Avx512(LinearKernelSetsF16()), "AVX3");
  EXPECT_EQ(Avx512(LinearKernelSetsF32()), "AVX3");
  EXPECT_EQ(Avx512(CodesKernelSets()), "AVX3_ZEN4 AVX3");
  EXPECT_EQ(Avx512(Int8KernelSets()), "AVX3_DL AVX3");
  EXPECT_EQ(Avx512(Block32KernelSets()), "AVX3_DL AVX3");
  EXPECT_EQ(Avx512(Block256KernelSets()), "AVX3_DL AVX3");
  EXPECT_EQ(Avx512(I4BlockKernelSets()), "AVX3_DL AVX3");
  EXPECT_EQ(Avx512(ExactBlock32KernelSets()), "AVX3");
  EXPECT_EQ(Avx512(ExactBlock256KernelSets()), "AVX3");
}

TEST_F(TilesTest, OfFloatsAreAlike) {
  for (const auto sets :
       {LinearKernelSetsBF16(), LinearKernelSetsF16(), LinearKernelSetsF32()}) {
    for (const DType a : {DType::kBF16, DType::kF32}) {
      for (const LinearKernelSet& set : SetsThatRun(sets, a)) {
        SCOPED_TRACE(testing::Message()
                     << set.isa.name() << " a=" << DTypeName(a));
        const LinearKernels kernels = set.get(a);
        EXPECT_EQ(kernels.sums, TileSums::kAlike);
        ExpectLinesAlike(kernels.table, kernels.elements_per_line);
      }
    }
  }
  EXPECT_GT(tiles_, 0);
}

// Exact sums are alike among all sets, too: those of q * b, where a row is q or
// q + 128.
TEST_F(TilesTest, OfInt8AreAlikeAndTheSameInEverySet) {
  constexpr size_t kK = 99;
  constexpr size_t kQuads = (kK + 3) / 4;
  EmulateAvxVnniInt8();
  const bool has_vpdpbssd = kAvx2VnniInt8.Runs();
  const AlignedBuffer q = FiniteBytes(rng_, kK);
  const AlignedBuffer b = FiniteBytes(rng_, kQuads * 64);
  std::vector<int> shifts;
  for (const Int8KernelSet& set : SetsThatRun(Int8KernelSets(), DType::kF32)) {
    SCOPED_TRACE(set.isa.name());
    const Int8Kernels kernels = set.get(DType::kF32);
    EXPECT_EQ(kernels.sums, TileSums::kExact);
    ExpectLinesAlike(kernels.table, kernels.row_words);
    shifts.push_back(kernels.row_shift);
    std::vector<uint8_t> row(kK);
    Sums want(kCols);
    for (size_t k = 0; k < kK; ++k) {
      row[k] = static_cast<uint8_t>(q.data()[k] + kernels.row_shift);
      for (size_t c = 0; c < kCols; ++c) {
        const auto weight =
            static_cast<int8_t>(b.data()[k / 4 * 64 + 4 * c + k % 4]);
        const int term = static_cast<int8_t>(q.data()[k]) + kernels.row_shift;
        want[c] += static_cast<uint32_t>(term * weight);
      }
    }
    std::vector<uint32_t> words(PackedRowPitch(kernels.row_words));
    kernels.store_row(row.data(), kK, words.data());
    const Sums sums =
        Run(kernels.table.tiles[1][0], {words.size(), kBytes, kQuads},
            words.data(), b.data(), 1, 1);
    EXPECT_EQ(sums, want);
  }
  EXPECT_GT(tiles_, 0);
  // Rows of s8 are those of AVX-VNNI-INT8 alone.
  EXPECT_EQ(std::count(shifts.begin(), shifts.end(), 0), has_vpdpbssd ? 1 : 0);
  EXPECT_EQ(EmulatedInstructions() > 0, AvxVnniInt8IsEmulated());
  std::printf("AVX2_VNNI_INT8 %s\n", AvxVnniInt8IsEmulated()
                                         ? "runs by emulation"
                                     : has_vpdpbssd ? "runs"
                                                    : "does not run");
}

// AVX2_VNNI stands for AVX2_VNNI_INT8 where there are no kernels for it, so
// that no other test would miss them.
TEST(KernelSetsTest, Int8TakesKernelsOfTheLeafThatIsAskedFor) {
  EmulateAvxVnniInt8();
  for (const Isa& isa : SupportedIsas()) {
    if (isa.highway != HWY_AVX2) continue;
    UseIsaForTest(&isa);
    EXPECT_STREQ(GetInt8Kernels(DType::kF32).target, isa.name());
  }
  UseIsaForTest(nullptr);
}

TEST_F(TilesTest, OfCodesAreAlike) {
  for (const CodeType codes : {CodeType::kE4M3, CodeType::kI8, CodeType::kI4}) {
    for (const CodesKernelSet& set :
         SetsThatRun(CodesKernelSets(), codes, DType::kBF16)) {
      SCOPED_TRACE(testing::Message()
                   << set.isa.name() << " codes " << static_cast<int>(codes));
      const CodesKernels kernels = set.get(codes, DType::kBF16);
      EXPECT_EQ(kernels.sums, TileSums::kAlike);
      ExpectLinesAlike(kernels.fused, kernels.fused_elements);
      ExpectLinesAlike(kernels.decoded, 2);
    }
  }
}

// Rows of int8 in blocks by records of block formats.
TEST_F(TilesTest, OfBlocksAreAlikeWhereverTheyAreDecoded) {
  for (const BlockFormatInfo& info : BlockFormats()) {
    const auto sets =
        info.values == 32 ? Block32KernelSets() : Block256KernelSets();
    for (const BlockKernelSet& set :
         SetsThatRun(sets, info.format, DType::kF32)) {
      SCOPED_TRACE(testing::Message()
                   << set.isa.name() << " " << std::string(info.name));
      const BlockKernels kernels = set.get(info.format, DType::kF32);
      EXPECT_EQ(kernels.sums, TileSums::kAlike);
      for (const size_t blocks : {size_t{1}, size_t{8}}) {
        const TileForm fused = {kernels.row_pitch, kBytes, blocks};
        const TileForm decoded = {kernels.row_pitch, sizeof(DecodedRecord),
                                  blocks};
        ExpectAlike(kernels.decoded, decoded);
        ExpectAlike(kernels.fused, fused);
        DecodedRecord record = {};
        kernels.decode(panels_.data(), blocks, &record);
        ExpectSame(kernels.fused, fused, kernels.decoded, decoded, &record);
      }
    }
  }
  EXPECT_GT(tiles_, 0);
}

TEST_F(TilesTest, OfI4BlocksAreAlikeWhereverTheyAreDecoded) {
  constexpr size_t kGroupBlocks = 4;
  const std::vector<float> scales =
      UniformReals<float>(rng_, 8 * kCols, 0.5, 2);
  const std::vector<float> zeros = SmallIntegers<float>(rng_, 8 * kCols, -8, 7);
  const I4Groups groups = {scales.data(), zeros.data(), kGroupBlocks, 1};
  for (const bool zero_points : {false, true}) {
    for (const I4BlockKernelSet& set :
         SetsThatRun(I4BlockKernelSets(), zero_points, DType::kF32)) {
      SCOPED_TRACE(testing::Message()
                   << set.isa.name() << " zero points " << zero_points);
      const I4BlockKernels kernels = set.get(zero_points, DType::kF32);
      EXPECT_EQ(kernels.sums, TileSums::kAlike);
      constexpr size_t kPitch = sizeof(BlockRow) / sizeof(uint32_t);
      const TileForm fused = {kPitch, kBytes, 8, &groups};
      const TileForm decoded = {kPitch, sizeof(DecodedRecord), 8};
      ExpectAlike(kernels.decoded, decoded);
      ExpectAlike(kernels.fused, fused);
      DecodedRecord record = {};
      kernels.decode(panels_.data(), 8, groups, &record);
      ExpectSame(kernels.fused, fused, kernels.decoded, decoded, &record);
    }
  }
  EXPECT_GT(tiles_, 0);
}

// Rows of f32 by records of block formats.
TEST_F(TilesTest, OfExactBlocksAreAlikeWhereverTheyAreDecoded) {
  for (const BlockFormatInfo& info : BlockFormats()) {
    const auto sets = info.values == 32 ? ExactBlock32KernelSets()
                                        : ExactBlock256KernelSets();
    for (const ExactBlockKernelSet& set : SetsThatRun(sets, info.format)) {
      SCOPED_TRACE(testing::Message()
                   << set.isa.name() << " " << std::string(info.name));
      const ExactBlockKernels kernels = set.get(info.format);
      EXPECT_EQ(kernels.sums, TileSums::kAlike);
      const TileForm fused = {PackedRowPitch(1), kBytes, 8};
      ExpectAlike(kernels.fused, fused);
      if (kernels.fused.max_rows == 0) continue;
      AlignedBuffer record = AlignedBuffer::Create(sizeof(ExactRecord)).value();
      auto* to = record.data<ExactRecord>();
      kernels.decode(panels_.data(), 8, to);
      int compared = 0;
      for (const LinearKernelSet& linear : LinearKernelSetsF32()) {
        if (linear.isa != set.isa || !linear.runs()) continue;
        ++compared;
        ExpectSame(kernels.fused, fused, linear.get(DType::kF32).table,
                   {PackedRowPitch(1), sizeof(ExactRecord), kChunkLines}, to);
      }
      EXPECT_EQ(compared, 1);
    }
  }
}

}  // namespace
}  // namespace quern
