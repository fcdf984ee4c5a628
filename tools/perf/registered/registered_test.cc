// Every registered operator that perf runs passes its check, and none passes
// with one element that is four units in the last place from what it was.

#include "quern/tools/perf/registered/registered.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/testing/reference_convert.h"
#include "quern/tools/perf/args.h"
#include "quern/tools/perf/op.h"
#include "quern/tools/perf/op_util.h"
#include "quern/tools/perf/registered/registered_check.h"

namespace quern {
namespace {

using ::testing::HasSubstr;
using Views = absl::Span<const AnyTensorView>;

constexpr absl::string_view kDTypes[] = {"f32", "bf16", "f16"};

// The tensors that an operator writes, by their places.
struct Written {
  absl::string_view op;
  std::vector<size_t> tensors;
};
const std::vector<Written>& AllWritten() {
  static const auto* all = new std::vector<Written>{
      {"fused_add_rms_norm", {0, 1}},
      {"gemma_rms_norm", {2}},
      {"l2_norm", {1}},
      {"layer_norm", {3}},
      {"rms_norm_gated", {3}},
      {"mixer2_gated_rms_norm", {3}},
      {"rms_norm_quant", {2, 3}},
      {"fused_add_rms_norm_quant", {1, 3, 4}},
      {"rms_norm_static_quant", {2}},
      {"fused_add_rms_norm_static_quant", {1, 3}},
      {"quant_fp8", {1, 2}},
      {"static_quant_fp8", {2}},
      {"quant_int8", {1, 2}},
      {"rotary_embedding", {1, 2}},
      {"mrope", {1, 2}},
      {"dual_chunk_rotary_embedding", {3, 4}},
      {"apply_rotary_emb", {3}},
      {"vocab_parallel_embedding", {2}},
      {"gather_rows", {2}},
      {"logits_processor", {0}},
      {"sigmoid_mul", {2}},
  };
  return *all;
}

// Check of the operator at 5 rows of 512, whose results are tampered with.
absl::StatusOr<double> Check(absl::string_view op, absl::string_view dtype,
                             Tamper tamper) {
  const std::vector<std::string> words = {absl::StrCat("--dtype=", dtype),
                                          "--rows=5", "--hidden=512"};
  for (const OpEntry& entry : RegisteredOps()) {
    if (entry.name != op) continue;
    const std::vector<absl::string_view> views(words.begin(), words.end());
    const auto args = Args::Parse(op, entry.keys, {}, views);
    if (!args.ok()) return args.status();
    auto made = MakeRegisteredForTest(*args, std::move(tamper));
    if (!made.ok()) return made.status();
    InlineExecutor executor;
    const absl::Status ready = (*made)->Setup(1, executor);
    if (!ready.ok()) return ready;
    return (*made)->Check(executor);
  }
  return absl::NotFoundError(op);
}

// fn(elements, count) of a dense tensor.
template <typename Fn>
void VisitElements(const AnyTensorView& v, const Fn& fn) {
  int64_t count = 1;
  for (int d = 0; d < v.rank(); ++d) count *= v.extent(d);
  WithType(v.dtype(), [&](auto type) {
    fn(static_cast<decltype(type)*>(v.mutable_data()),
       static_cast<size_t>(count));
  });
}

// x, moved towards zero or past it by four units in the last place of a 16-bit
// or fp8 value, or by four steps of an integer. f32 is moved by 2^-14 of it,
// 1024 units of 2^-24, because the bound of f32 results holds their arithmetic
// as well.
template <typename T>
T Nudged(T x) {
  const double v = ToDouble(x);
  double by = 4.0;
  if constexpr (std::is_same_v<T, float>) {
    by = 0x1p-14 * (v == 0.0 ? 1.0 : std::abs(v));
  } else if constexpr (!std::is_integral_v<T>) {
    by = 8 * RoundingBound<T>(v);
  }
  return FromDouble<T>(v - std::copysign(by, v));
}

TEST(RegisteredOpsTest, AllAreInTheTable) {
  std::vector<std::string> in_table, in_perf;
  for (const Written& written : AllWritten()) {
    in_table.emplace_back(written.op);
  }
  for (const OpEntry& entry : RegisteredOps()) in_perf.emplace_back(entry.name);
  EXPECT_EQ(in_perf, in_table);
}

TEST(RegisteredOpsTest, AgreeWithTheDoubleReference) {
  for (const Written& written : AllWritten()) {
    for (const absl::string_view dtype : kDTypes) {
      const auto error = Check(written.op, dtype, nullptr);
      EXPECT_TRUE(error.ok()) << dtype << ": " << error.status();
    }
  }
}

// The largest element of a row is nudged, because the bounds of turned pairs
// depend on both elements of the pair.
TEST(RegisteredOpsTest, AreCaughtWithOneElementFourUnitsOff) {
  for (const Written& written : AllWritten()) {
    for (const absl::string_view dtype : kDTypes) {
      for (const size_t tensor : written.tensors) {
        for (const bool last_row : {false, true}) {
          const auto error = Check(written.op, dtype, [&](Views views) {
            VisitElements(views[tensor], [&](auto* x, size_t count) {
              const size_t row = count / 5;
              const size_t begin = last_row ? count - row : 0;
              size_t most = begin;
              for (size_t i = begin; i < begin + row; ++i) {
                if (std::abs(ToDouble(x[i])) > std::abs(ToDouble(x[most]))) {
                  most = i;
                }
              }
              x[most] = Nudged(x[most]);
            });
          });
          EXPECT_EQ(error.status().code(), absl::StatusCode::kInternal)
              << written.op << " " << dtype << ", tensor " << tensor << ": "
              << error.status();
          EXPECT_THAT(error.status().message(), HasSubstr("wrong"));
        }
      }
    }
  }
}

// An error of 0.03 is within the absolute 0.0625 that bf16 was allowed when
// operators were compared with their own reference providers.
TEST(RegisteredOpsTest, AreCaughtWithAnErrorOfThreeHundredths) {
  for (const absl::string_view op :
       {"fused_add_rms_norm", "gemma_rms_norm", "rms_norm_gated",
        "mixer2_gated_rms_norm", "rotary_embedding", "mrope",
        "apply_rotary_emb", "vocab_parallel_embedding", "gather_rows"}) {
    for (const Written& written : AllWritten()) {
      if (written.op != op) continue;
      const size_t tensor = written.tensors[0];
      const auto error = Check(op, "bf16", [&](Views views) {
        VisitElements(views[tensor], [](auto* x, size_t count) {
          // A unit of bf16 is 2^-7 or 2^-8 for magnitudes around 1.
          size_t i = 0;
          while (i + 1 < count && !(std::abs(ToDouble(x[i])) > 0.5 &&
                                    std::abs(ToDouble(x[i])) < 1.9)) {
            ++i;
          }
          x[i] = FromDouble<std::decay_t<decltype(*x)>>(ToDouble(x[i]) + 0.03);
        });
      });
      EXPECT_EQ(error.status().code(), absl::StatusCode::kInternal) << op;
    }
  }
}

TEST(RegisteredOpsTest, AreCaughtWithNaN) {
  for (const Written& written : AllWritten()) {
    for (const size_t tensor : written.tensors) {
      bool has_nan = false;
      const auto error = Check(written.op, "bf16", [&](Views views) {
        VisitElements(views[tensor], [&](auto* x, size_t count) {
          using T = std::decay_t<decltype(*x)>;
          if constexpr (IsFloatStorage<T>) {
            has_nan = true;
            const double nan = std::numeric_limits<double>::quiet_NaN();
            for (size_t i = 0; i < count; ++i) x[i] = FromDouble<T>(nan);
          }
        });
      });
      EXPECT_EQ(error.ok(), !has_nan) << written.op << ", tensor " << tensor;
    }
  }
}

TEST(CheckRegisteredTest, FailsWithoutAReferenceAndWithoutRows) {
  InlineExecutor executor;
  EXPECT_EQ(
      CheckRegistered("mine", 1, {}, executor).status(),
      absl::InternalError("mine: registered_check.cc has no reference for it"));
  EXPECT_EQ(CheckRegistered("quant_fp8", 0, {}, executor).status(),
            absl::InternalError("quant_fp8: no element was compared"));
}

}  // namespace
}  // namespace quern
