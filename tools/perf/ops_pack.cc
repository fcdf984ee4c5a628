#include "quern/tools/perf/ops_pack.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/packing/vnni_layout.h"
#include "quern/packing/vnni_pack.h"
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

}  // namespace

OpEntry PackOp() {
  return {"pack",
          "weights into the layout of dot-product instructions",
          {{"dtype", "bf16", "bf16, f16 or int8"},
           {"n", "14336", "output columns"},
           {"k", "4096", "inner dimension"},
           {"source", "nk", "nk: weights[n, k], as models store them; kn"}},
          &Pack::Create};
}

}  // namespace quern
