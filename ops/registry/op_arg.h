#ifndef QUERN_OPS_REGISTRY_OP_ARG_H_
#define QUERN_OPS_REGISTRY_OP_ARG_H_

// The named arguments that an operator is made with:
//
//   const NamedArgs args = {{"x", TensorMeta{DType::kBF16, {tokens, hidden}}},
//                           {"weights", &weights},    // a LinearWeights
//                           {"eps", 1},               // any number
//                           {"approximate", "tanh"}};

#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "quern/core/dtype.h"
#include "quern/ops/registry/op_schema.h"

namespace quern {

// The dtype and the extents of a tensor, without its data.
struct TensorMeta {
  DType dtype = DType::kF32;
  std::vector<int64_t> extents;

  friend bool operator==(const TensorMeta& a, const TensorMeta& b) {
    return a.dtype == b.dtype && a.extents == b.extents;
  }
};
struct MutatedMeta : TensorMeta {};

// The name that schemas use for a C++ type whose objects are arguments. An
// object is borrowed, so it must outlive the operator that is made
// with it, unless the header of the operator's family says that it may be
// dropped.
// Operators take a pointer to T; a name for const T makes the object read-only.
// An embedder specialises this for its own types.
template <typename T>
struct OpObject;

class Communicator;
class KvLayout;
class LinearWeights;
class RotaryEmbeddingPlan;
struct AttentionStep;
struct ExpertWeights;
struct MlaStep;
struct MlaWeights;
struct OneDnnHandler;
struct RotaryScaling;
struct SamplingStep;
struct SchedulerMetadata;

template <>
struct OpObject<Communicator> {  // core/communicator.h
  static constexpr char kName[] = "Communicator";
};
template <>
struct OpObject<const KvLayout> {  // cache/kv_layout.h
  static constexpr char kName[] = "KvLayout";
};
template <>
struct OpObject<const LinearWeights> {  // gemm/linear_weights.h
  static constexpr char kName[] = "LinearWeights";
};
template <>
struct OpObject<
    const AttentionStep> {  // ops/registry/families/attention/attention_ops.h
  static constexpr char kName[] = "AttentionStep";
};
template <>
struct OpObject<const ExpertWeights> {  // ops/moe/experts.h
  static constexpr char kName[] = "ExpertWeights";
};
template <>
struct OpObject<const MlaStep> {  // ops/registry/families/attention/mla_ops.h
  static constexpr char kName[] = "MlaStep";
};
template <>
struct OpObject<const MlaWeights> {  // ops/mla/mla_weights.h
  static constexpr char kName[] = "MlaWeights";
};
template <>
struct OpObject<OneDnnHandler> {  // ops/registry/vllm/linear_ops.h
  static constexpr char kName[] = "OneDnnHandler";
};
template <>
struct OpObject<const RotaryEmbeddingPlan> {  // ops/rope/rotary_embedding.h
  static constexpr char kName[] = "RotaryEmbeddingPlan";
};
template <>
struct OpObject<const RotaryScaling> {  // ops/rope/rotary_scaling.h
  static constexpr char kName[] = "RotaryScaling";
};
template <>
struct OpObject<
    const SamplingStep> {  // ops/registry/families/rows/sampling_ops.h
  static constexpr char kName[] = "SamplingStep";
};
template <>
struct OpObject<SchedulerMetadata> {  // ops/registry/vllm/attention_ops.h
  static constexpr char kName[] = "SchedulerMetadata";
};

template <typename T, typename = void>
struct IsOpObject : std::false_type {};
template <typename T>
struct IsOpObject<T, std::void_t<decltype(OpObject<T>::kName)>>
    : std::true_type {};

// A borrowed object, and the name of its type.
struct OpObjectRef {
  const char* type = "";
  const void* object = nullptr;
};

// The value of one argument; std::monostate if it is omitted. OpArg is a
// std::variant, so std::get and std::get_if read it.
class OpArg : public std::variant<std::monostate, TensorMeta, int64_t, double,
                                  bool, std::string, OpObjectRef> {
 public:
  OpArg() = default;
  OpArg(TensorMeta meta) : variant(std::move(meta)) {}
  OpArg(std::string text) : variant(std::move(text)) {}
  OpArg(absl::string_view text) : variant(std::string(text)) {}
  OpArg(const char* text) : variant(std::string(text)) {}
  // An unsigned number of 2^63 or more becomes a double.
  template <typename T, std::enable_if_t<std::is_arithmetic_v<T>, int> = 0>
  OpArg(T number) : variant(Number(number)) {}
  template <typename T,
            std::enable_if_t<IsOpObject<T>::value || IsOpObject<const T>::value,
                             int> = 0>
  OpArg(T* object) : variant(Object(object)) {}
  // Accepts a pointer to any class derived from Communicator.
  OpArg(Communicator* ranks) : variant(Object(ranks)) {}

 private:
  template <typename T>
  static variant Number(T number) {
    if constexpr (std::is_same_v<T, bool>) {
      return variant(std::in_place_type<bool>, number);
    } else if constexpr (std::is_floating_point_v<T>) {
      return variant(std::in_place_type<double>, number);
    } else {
      if constexpr (std::is_unsigned_v<T> && sizeof(T) >= sizeof(int64_t)) {
        if (number > static_cast<T>(std::numeric_limits<int64_t>::max())) {
          return variant(std::in_place_type<double>,
                         static_cast<double>(number));
        }
      }
      return variant(std::in_place_type<int64_t>, number);
    }
  }
  template <typename T>
  static OpObjectRef Object(T* object) {
    using Named = std::conditional_t<IsOpObject<T>::value, T, const T>;
    return {OpObject<Named>::kName, object};
  }
};
using NamedArgs = std::vector<std::pair<absl::string_view, OpArg>>;

// Returns the arguments in the order of the schema, with defaults filled in. An
// int may be given for a float, and a null object counts as omitted.
// InvalidArgument names the operator and the parameter: an argument that is
// missing, given twice or of another type, or a tensor with a negative extent.
absl::StatusOr<std::vector<OpArg>> ArrangeArgs(const OpSchema& schema,
                                               const NamedArgs& args);

// The dtype and the shape as refusals have them: "bf16[4, 64]".
std::string PrintMeta(const TensorMeta& meta);

// InvalidArgument unless the tensor has these extents, or is `want` with its
// dtype: "op: weight is f32[63]; need [64]". `why` is put behind what is
// needed.
absl::Status CheckExtents(absl::string_view op, absl::string_view field,
                          const TensorMeta& meta,
                          const std::vector<int64_t>& want,
                          absl::string_view why = "");
absl::Status CheckMeta(absl::string_view op, absl::string_view field,
                       const TensorMeta& meta, const TensorMeta& want,
                       absl::string_view why = "");

// Returns `status` with the operator's name before its message. The name of
// another operator or plan, which shares a refusing function with this one, is
// taken away: "rms_norm: hidden=0" becomes "gemma_rms_norm: hidden=0".
// Allocates nothing for OK.
absl::Status OfOp(absl::string_view op, const absl::Status& status);

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_OP_ARG_H_
