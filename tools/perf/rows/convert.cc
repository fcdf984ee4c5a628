#include "quern/tools/perf/rows/convert.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/quant/convert.h"
#include "quern/testing/reference_convert.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"

namespace quern {
namespace {

constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16,
                            DType::kF8E4M3, DType::kF8E5M2};
constexpr int64_t kMaxElements = int64_t{1} << 36;

// out[i] = round(in[i]), from one type to another.
class Convert final : public Op {
 public:
  static absl::StatusOr<std::unique_ptr<Op>> Create(const Args& args) {
    ConvertSpec spec;
    QUERN_ASSIGN_OR_RETURN(spec.from, args.Type("from", kTypes));
    QUERN_ASSIGN_OR_RETURN(spec.to, args.Type("to", kTypes));
    QUERN_ASSIGN_OR_RETURN(const int64_t elements,
                           args.Int("elements", 1, kMaxElements));
    QUERN_ASSIGN_OR_RETURN(ConvertPlan plan, ConvertPlan::Create(spec));
    return absl::WrapUnique<Op>(new Convert(std::move(plan), elements));
  }

  OpInfo Info() const override {
    OpInfo info;
    info.shape = absl::StrCat("elements=", elements_);
    info.dtype = absl::StrCat(DTypeName(plan_.spec().from), "->",
                              DTypeName(plan_.spec().to));
    info.isa = plan_.target();
    info.SetTraffic(static_cast<double>(in_bytes()),
                    static_cast<double>(out_bytes()));
    return info;
  }

  int64_t set_bytes() const override { return in_bytes() + out_bytes(); }

  absl::Status Setup(int64_t sets, Executor&) override {
    QUERN_RETURN_IF_ERROR(in_.Create(sets, in_bytes()));
    QUERN_RETURN_IF_ERROR(out_.Create(sets, out_bytes()));
    WithType(plan_.spec().from,
             [this](auto type) { FillReals<decltype(type)>(-2, 2, in_); });
    return plan_.CheckArgs(In(0), Out(0));
  }

  void Run(int64_t set, Executor& executor) override {
    plan_.Execute(In(set), Out(set), executor);
  }

  absl::StatusOr<double> Check(Executor& executor) override {
    Run(0, executor);
    return WithType(plan_.spec().from, [&](auto from) {
      return WithType(plan_.spec().to, [&](auto to) {
        return Compare<decltype(from), decltype(to)>(executor);
      });
    });
  }

 private:
  Convert(ConvertPlan plan, int64_t elements)
      : plan_(std::move(plan)), elements_(elements) {}

  int64_t in_bytes() const {
    return elements_ * static_cast<int64_t>(SizeOf(plan_.spec().from));
  }
  int64_t out_bytes() const {
    return elements_ * static_cast<int64_t>(SizeOf(plan_.spec().to));
  }
  AnyTensorView View(DType dtype, void* data) const {
    return AnyTensorView(dtype, data, 1, {elements_}, {1});
  }
  AnyTensorView In(int64_t set) { return View(plan_.spec().from, in_.at(set)); }
  AnyTensorView Out(int64_t set) { return View(plan_.spec().to, out_.at(set)); }

  // The error is against the input; the bound, no more than correct rounding.
  template <typename From, typename To>
  absl::StatusOr<double> Compare(Executor& executor) {
    const From* in = in_.at<From>(0);
    const To* out = out_.at<To>(0);
    return JudgeAll("convert", elements_, executor,
                    [in, out](int64_t i, Verdict& verdict) {
                      const double x = ToDouble(in[i]);
                      const To want = FromDouble<To>(x);
                      const double bound = BitsOf(want) == BitsOf(out[i])
                                               ? std::abs(ToDouble(want) - x)
                                               : -1;  // nothing passes
                      verdict.Add(i, ToDouble(out[i]), x, bound);
                    });
  }

  ConvertPlan plan_;
  int64_t elements_;
  SetBuffer in_, out_;
};

}  // namespace

OpEntry ConvertOp() {
  return {"convert",
          "out[i] = round(in[i]), between floating-point types",
          {{"from", "f32", "f32, bf16, f16, f8e4m3 or f8e5m2"},
           {"to", "bf16", "the same"},
           {"elements", "67108864", "elements of in"}},
          &Convert::Create};
}

}  // namespace quern
