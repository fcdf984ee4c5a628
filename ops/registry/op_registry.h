#ifndef QUERN_OPS_REGISTRY_OP_REGISTRY_H_
#define QUERN_OPS_REGISTRY_OP_REGISTRY_H_

// Operators by name: a schema, a function that infers shapes, and an
// implementation for each of several providers. A value, not a global: an
// embedder builds one at start-up, adds or overrides, and constructs from it.
//
//   OpRegistry registry;
//   QUERN_RETURN_IF_ERROR(RegisterAllOps(registry));  // all_ops.h
//   QUERN_RETURN_IF_ERROR(registry.Override<&MakeMine>("rms_norm", "mine"));
//   QUERN_ASSIGN_OR_RETURN(OpPolicy policy, OpPolicy::Parse("none,+rms_norm"));
//   OpDispatcher ops(registry, policy);
//   const TensorMeta x_meta{DType::kBF16, {tokens, hidden}};
//   QUERN_ASSIGN_OR_RETURN(MadeOp norm, ops.Make("rms_norm", {{"x", x_meta}}));
//   const AnyTensorView tensors[] = {x, AnyTensorView(), out};  // no weight
//   QUERN_RETURN_IF_ERROR(norm.op->CheckArgs(tensors));
//   norm.op->Execute(tensors, executor);
//
// An operator with weights to pack is handed them first, by Prepare
// (linear_ops.h). A whole program with an override: examples/embed_workspace.
//
// A typed function, in the example
//
//   absl::StatusOr<std::unique_ptr<BoundOp>> MakeMine(
//       const TensorMeta& x, const std::optional<TensorMeta>& weight,
//       double eps, int64_t var_hidden_size);
//
// makes an operator (Add, Override) or infers shapes (Define), for which it
// returns absl::StatusOr<std::vector<TensorMeta>>. It has the schema's
// parameters, all of them and in their order, in its signature:
//
//   Tensor            const TensorMeta&
//   Tensor(aN!)       const MutatedMeta&
//   Tensor?           const std::optional<TensorMeta>&
//   Tensor(aN!)?      const std::optional<MutatedMeta>&
//   int float bool    int64_t double bool     str  const std::string&
//   Communicator?     Communicator*           null where it is left out
//
// and whoever registers one whose signature is not its schema is refused.
// What links a kernel alone does not see any of this.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/communicator.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/ops/registry/op_schema.h"

namespace quern {

// A tensor without its data.
struct TensorMeta {
  DType dtype = DType::kF32;
  std::vector<int64_t> extents;

  friend bool operator==(const TensorMeta& a, const TensorMeta& b) {
    return a.dtype == b.dtype && a.extents == b.extents;
  }
};
struct MutatedMeta : TensorMeta {};

// A communicator is borrowed by the operator that is made with it.
using OpArg = std::variant<std::monostate, TensorMeta, int64_t, double, bool,
                           std::string, Communicator*>;
using NamedArgs = std::vector<std::pair<absl::string_view, OpArg>>;

// The arguments in the order of the schema, defaults filled in; an int may be
// given for a float. InvalidArgument names the operator and the parameter, also
// of a tensor with a negative extent.
absl::StatusOr<std::vector<OpArg>> ArrangeArgs(const OpSchema& schema,
                                               const NamedArgs& args);

// A refusal in the name of an operator, whichever of the functions that several
// operators share it comes from.
absl::Status OfOp(absl::string_view op, const absl::Status& status);

// An operator that was constructed: the implementation is chosen.
class BoundOp {
 public:
  virtual ~BoundOp() = default;

  // The instruction set, "scalar" where there is none to choose.
  virtual const char* target() const = 0;
  // Hands over the weights of an operator that packs them; what else there is
  // among `tensors` is not read. Called before CheckArgs and Execute, whose
  // executors have no more workers than this one, and again after the weights
  // have changed; by all ranks, where there are ranks. Not at the same time as
  // another call. Most operators have nothing to do here.
  virtual absl::Status Prepare(absl::Span<const AnyTensorView> /*tensors*/,
                               Executor& /*executor*/) {
    return absl::OkStatus();
  }

  // Whether Execute may be called with these: the schema's tensors in its
  // order, a default-constructed view for one that is left out, and then what
  // it returns. InvalidArgument names the argument. Rows may be more or fewer
  // than those that the operator was made with, but for what the header of its
  // family says.
  virtual absl::Status CheckArgs(
      absl::Span<const AnyTensorView> tensors) const = 0;
  // Writes the tensors that the schema marks, and those that it returns. Safe
  // to call concurrently.
  virtual void Execute(absl::Span<const AnyTensorView> tensors,
                       Executor& executor) const noexcept = 0;
};

using OpShapes = std::function<absl::StatusOr<std::vector<TensorMeta>>(
    absl::Span<const OpArg>)>;
// Unimplemented: not for these arguments; the next provider is asked, unless
// it is an override that says so.
using OpFactory = std::function<absl::StatusOr<std::unique_ptr<BoundOp>>(
    absl::Span<const OpArg>)>;

// What a C++ signature says of the parameters; names and defaults are left
// empty.
template <typename T>
struct OpParamOf;
template <>
struct OpParamOf<TensorMeta> {
  static OpParam Get() { return {}; }
  static const TensorMeta& From(const OpArg& arg) {
    return std::get<TensorMeta>(arg);
  }
};
template <>
struct OpParamOf<MutatedMeta> {
  static OpParam Get() { return {"", OpType::kTensor, false, true, {}}; }
  static MutatedMeta From(const OpArg& arg) {
    return {std::get<TensorMeta>(arg)};
  }
};
template <typename T>
struct OpParamOf<std::optional<T>> {
  static OpParam Get() {
    OpParam param = OpParamOf<T>::Get();
    param.optional = true;
    return param;
  }
  static std::optional<T> From(const OpArg& arg) {
    if (std::holds_alternative<std::monostate>(arg)) return std::nullopt;
    return OpParamOf<T>::From(arg);
  }
};
template <OpType kType, typename T>
struct ScalarParamOf {
  static OpParam Get() { return {"", kType, false, false, {}}; }
  static const T& From(const OpArg& arg) { return std::get<T>(arg); }
};
template <>
struct OpParamOf<int64_t> : ScalarParamOf<OpType::kInt, int64_t> {};
template <>
struct OpParamOf<double> : ScalarParamOf<OpType::kFloat, double> {};
template <>
struct OpParamOf<bool> : ScalarParamOf<OpType::kBool, bool> {};
template <>
struct OpParamOf<std::string> : ScalarParamOf<OpType::kString, std::string> {};
template <>
struct OpParamOf<Communicator*> {
  static OpParam Get() { return {"", OpType::kCommunicator, true, false, {}}; }
  static Communicator* From(const OpArg& arg) {
    const auto* ranks = std::get_if<Communicator*>(&arg);
    return ranks == nullptr ? nullptr : *ranks;
  }
};

template <auto kFunction>
struct TypedOp;
template <typename R, typename... A, R (*kFunction)(A...)>
struct TypedOp<kFunction> {
  static std::vector<OpParam> Params() {
    return {OpParamOf<std::decay_t<A>>::Get()...};
  }
  static R Call(absl::Span<const OpArg> args) {
    return Unpack(args, std::index_sequence_for<A...>());
  }

 private:
  template <size_t... kIndex>
  static R Unpack(absl::Span<const OpArg> args,
                  std::index_sequence<kIndex...>) {
    return kFunction(OpParamOf<std::decay_t<A>>::From(args[kIndex])...);
  }
};

// Arguments that an operator takes, for listings and tests; what is typed has
// this dtype.
using OpExample = NamedArgs (*)(DType);

struct OpImplementation {
  std::string provider;  // "reference", "simd", "onednn", or an embedder's
  OpFactory factory;
};

// Layers are what vLLM calls pluggable: linear layers, embedding, head, logits.
// `none` is not for them: they stay enabled but for a -op of their own.
enum class OpKind : uint8_t { kOperator, kLayer };

struct OpDefinition {
  OpSchema schema;
  OpKind kind = OpKind::kOperator;
  OpShapes shapes;
  OpExample example = nullptr;
  // The first that takes the arguments is chosen; the reference is the last.
  std::vector<OpImplementation> implementations;
  std::optional<OpImplementation> override_with;  // out of tree
};

class OpRegistry {
 public:
  static constexpr absl::string_view kReference = "reference";

  // The operator of `schema`, whose returns kShapes infers. InvalidArgument if
  // the text is none, or not kShapes' signature; AlreadyExists if there is one
  // of that name.
  template <auto kShapes>
  absl::Status Define(absl::string_view schema, OpExample example = nullptr,
                      OpKind kind = OpKind::kOperator) {
    return DefineTyped(schema, TypedOp<kShapes>::Params(),
                       &TypedOp<kShapes>::Call, example, kind);
  }
  // Adds an implementation, behind those there are but before the reference.
  // NotFound without such an operator, AlreadyExists with such a provider.
  template <auto kMake>
  absl::Status Add(absl::string_view op, absl::string_view provider) {
    return AddTyped(op, provider, TypedOp<kMake>::Params(),
                    &TypedOp<kMake>::Call);
  }
  // Takes the place of all of them where the operator is enabled, by its own
  // name and under its own policy. AlreadyExists if something else does.
  template <auto kMake>
  absl::Status Override(absl::string_view op, absl::string_view provider) {
    return OverrideTyped(op, provider, TypedOp<kMake>::Params(),
                         &TypedOp<kMake>::Call);
  }

  // Null: no such operator. Valid until the registry changes.
  const OpDefinition* Find(absl::string_view op) const;
  // Sorted.
  std::vector<std::string> Names() const;

  // What the operator returns, without touching data.
  absl::StatusOr<std::vector<TensorMeta>> InferShapes(
      absl::string_view op, const NamedArgs& args) const;

 private:
  absl::Status DefineTyped(absl::string_view schema,
                           std::vector<OpParam> signature, OpShapes shapes,
                           OpExample example, OpKind kind);
  absl::Status AddTyped(absl::string_view op, absl::string_view provider,
                        std::vector<OpParam> signature, OpFactory factory);
  absl::Status OverrideTyped(absl::string_view op, absl::string_view provider,
                             std::vector<OpParam> signature, OpFactory factory);

  std::map<std::string, OpDefinition, std::less<>> ops_;
};

}  // namespace quern

#endif  // QUERN_OPS_REGISTRY_OP_REGISTRY_H_
