#include "quern/tools/perf/linear/pack.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/gemm/weights/block_pack.h"
#include "quern/gemm/weights/block_pack_testutil.h"
#include "quern/packing/block_panels.h"
#include "quern/packing/vnni_layout.h"
#include "quern/packing/vnni_pack.h"
#include "quern/quant/block_format.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"

namespace quern {
namespace {

// packed[n / 16][k / v][n % 16][k % v] = b[k, n]
class Pack final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    QUERN_ASSIGN_OR_RETURN(const std::string dtype,
                           args.Choice("dtype", {"bf16", "f16", "i8", "int8"}));
    QUERN_ASSIGN_OR_RETURN(const std::string source,
                           args.Choice("source", {"nk", "kn"}));
    QUERN_ASSIGN_OR_RETURN(const int64_t n, args.Int("n", 1, 1 << 24));
    QUERN_ASSIGN_OR_RETURN(const int64_t k, args.Int("k", 1, 1 << 24));
    VnniPackSpec spec;
    QUERN_ASSIGN_OR_RETURN(const DType type,
                           ParseDType(dtype == "int8" ? "i8" : dtype));
    QUERN_ASSIGN_OR_RETURN(spec.layout, VnniLayout::Create(type, k, n));
    spec.order = source == "nk" ? WeightOrder::kNK : WeightOrder::kKN;
    QUERN_ASSIGN_OR_RETURN(VnniPackPlan plan, VnniPackPlan::Create(spec));
    return absl::WrapUnique<Op>(new Pack(std::move(plan)));
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape = absl::StrCat("n=", layout().n(), " k=", layout().k(),
                              " source=", nk() ? "nk" : "kn");
    info.dtype = std::string(DTypeName(layout().dtype()));
    info.isa = plan_.target();
    info.SetTraffic(static_cast<double>(plain_bytes()),
                    static_cast<double>(layout().bytes()));
    info.peak_kind = PeakKindOf(layout().dtype());
    return info;
  }

  int64_t set_bytes() const override {
    return plain_bytes() + layout().bytes();
  }

  absl::Status Setup(int64_t sets, Executor&) override {
    QUERN_RETURN_IF_ERROR(plain_.Create(sets, plain_bytes()));
    QUERN_RETURN_IF_ERROR(packed_.Create(sets, layout().bytes()));
    // Bits, whatever the dtype: packing does not look at them.
    FillReals<uint8_t>(0, 255, plain_);
    return plan_.CheckArgs(Plain(0), packed_.at(0));
  }

  void Run(int64_t set, Executor& executor) override {
    plan_.Pack(Plain(set), packed_.at(set), executor);
  }

  // Every byte, padding included, by the formula of the layout.
  absl::StatusOr<double> Check(Executor& executor) override {
    std::memset(packed_.at(0), 0x55, static_cast<size_t>(packed_.bytes()));
    Run(0, executor);
    const auto size = static_cast<int64_t>(SizeOf(layout().dtype()));
    const int64_t v = layout().v();
    const int64_t lines = layout().lines();
    const uint8_t* plain = plain_.at(0);
    const uint8_t* packed = packed_.at(0);
    return JudgeAll("pack", layout().bytes(), executor,
                    [&](int64_t at, Verdict& verdict) {
                      const int64_t byte = at % size, element = at / size;
                      const int64_t i = element % v, c = element / v % 16;
                      const int64_t l = element / v / 16 % lines;
                      const int64_t p = element / v / 16 / lines;
                      const int64_t k = l * v + i, n = p * 16 + c;
                      const int64_t from =
                          nk() ? n * layout().k() + k : k * layout().n() + n;
                      const bool inside = k < layout().k() && n < layout().n();
                      verdict.Add(at, packed[at],
                                  inside ? plain[from * size + byte] : 0, 0);
                    });
  }

 private:
  explicit Pack(VnniPackPlan plan) : plan_(std::move(plan)) {}

  const VnniLayout& layout() const { return plan_.layout(); }
  bool nk() const { return plan_.spec().order == WeightOrder::kNK; }
  int64_t plain_bytes() const {
    return layout().n() * layout().k() *
           static_cast<int64_t>(SizeOf(layout().dtype()));
  }
  AnyTensorView Plain(int64_t set) {
    const int64_t rows = nk() ? layout().n() : layout().k();
    const int64_t cols = nk() ? layout().k() : layout().n();
    return AnyTensorView(layout().dtype(),
                         static_cast<const void*>(plain_.at(set)), 2,
                         {rows, cols}, {cols, 1});
  }

  VnniPackPlan plan_;
  SetBuffer plain_, packed_;
};

// Rows of GGUF blocks, as a model is loaded.
class PackBlocks final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    std::vector<std::string> names;
    for (const BlockFormatInfo& info : BlockFormats()) {
      names.push_back(absl::AsciiStrToLower(info.name));
    }
    const std::vector<absl::string_view> choices(names.begin(), names.end());
    QUERN_ASSIGN_OR_RETURN(const std::string name,
                           args.Choice("weights", choices));
    for (const absl::string_view key : {"dtype", "source"}) {
      if (!args.given(key)) continue;
      return InvalidArgument("pack", key, " is given with weights=", name,
                             ", whose blocks have their own type and order");
    }
    const auto at = std::find(names.begin(), names.end(), name) - names.begin();
    const BlockFormatInfo& info = BlockFormats()[static_cast<size_t>(at)];
    BlockPackSpec spec;
    spec.format = info.format;
    QUERN_ASSIGN_OR_RETURN(spec.n, args.Int("n", 1, 1 << 24));
    QUERN_ASSIGN_OR_RETURN(spec.k, args.Int("k", 1, 1 << 24));
    QUERN_ASSIGN_OR_RETURN(BlockPackPlan plan, BlockPackPlan::Create(spec));
    return absl::WrapUnique<Op>(new PackBlocks(info, std::move(plan)));
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape =
        absl::StrCat("n=", layout().n(), " k=", layout().k(), " source=nk");
    info.dtype = absl::AsciiStrToLower(info_.name);
    info.isa = plan_.target();
    info.SetTraffic(static_cast<double>(plain_bytes()),
                    static_cast<double>(layout().bytes()));
    return info;
  }

  int64_t set_bytes() const override {
    return plain_bytes() + layout().bytes();
  }

  absl::Status Setup(int64_t sets, Executor&) override {
    QUERN_RETURN_IF_ERROR(plain_.Create(sets, plain_bytes()));
    QUERN_RETURN_IF_ERROR(packed_.Create(sets, layout().bytes()));
    // Bits: packing does not look at what they mean.
    FillReals<uint8_t>(0, 255, plain_);
    for (int64_t set = 0; set < sets; ++set) {
      for (int64_t n = 0; n < layout().n(); ++n) {
        rows_.push_back(plain_.at(set) + n * row_bytes());
      }
    }
    return plan_.CheckArgs(Rows(0), packed_.at(0));
  }

  void Run(int64_t set, Executor& executor) override {
    plan_.Pack(Rows(set), packed_.at(set), executor);
  }

  // Every field, padding included.
  absl::StatusOr<double> Check(Executor& executor) override {
    std::memset(packed_.at(0), 0x55, static_cast<size_t>(packed_.bytes()));
    Run(0, executor);
    const int64_t columns = layout().panels() * BlockPanels::kPanelCols;
    Verdict all;
    executor.ParallelFor(columns, [&](int64_t column, int) {
      Verdict mine;
      const bool inside = column < layout().n();
      const FileColumn file(info_,
                            rows_[inside ? static_cast<size_t>(column) : 0]);
      for (int64_t record = 0; record < layout().records(); ++record) {
        ForEachPacked(layout(), inside ? &file : nullptr, packed_.at(0), column,
                      record, [&](int64_t got, int64_t want, int64_t i) {
                        mine.Add(column * layout().k() + 256 * record + i,
                                 static_cast<double>(got),
                                 static_cast<double>(want), 0);
                      });
      }
      all.Merge(mine);
    });
    return all.Result("pack");
  }

 private:
  PackBlocks(const BlockFormatInfo& info, BlockPackPlan plan)
      : info_(info), plan_(std::move(plan)) {}

  const BlockPanels& layout() const { return plan_.layout(); }
  int64_t row_bytes() const {
    return layout().k() / info_.values * info_.bytes;
  }
  int64_t plain_bytes() const { return layout().n() * row_bytes(); }
  absl::Span<const uint8_t* const> Rows(int64_t set) const {
    const auto n = static_cast<size_t>(layout().n());
    return absl::MakeConstSpan(rows_).subspan(static_cast<size_t>(set) * n, n);
  }

  const BlockFormatInfo& info_;
  BlockPackPlan plan_;
  SetBuffer plain_, packed_;
  std::vector<const uint8_t*> rows_;  // of all sets
};

absl::StatusOr<std::unique_ptr<Op>> CreatePack(const Args& args) {
  return args.Text("weights").empty() ? Pack::Create(args)
                                      : PackBlocks::Create(args);
}

}  // namespace

OpEntry PackOp() {
  return {
      "pack",
      "weights into the layout of dot-product instructions",
      {{"dtype", "bf16", "bf16, f16 or int8"},
       {"n", "14336", "output columns"},
       {"k", "4096", "inner dimension"},
       {"source", "nk", "nk: weights[n, k], as models store them; kn"},
       {"weights", "", "a block format in place of dtype: q4_k, q8_0, ..."}},
      &CreatePack};
}

}  // namespace quern
