#ifndef QUERN_OPS_REGISTRY_OP_REGISTRY_H_
#define QUERN_OPS_REGISTRY_OP_REGISTRY_H_

// Operators by name: a schema, a function that infers shapes, and an
// implementation by each of several providers. A registry is a value and not a
// global: an embedder builds one at start-up, adds or overrides operators, and
// constructs them from it.
//
//   OpRegistry registry;
//   QUERN_RETURN_IF_ERROR(RegisterAllOps(registry));  // all_ops.h
//   QUERN_RETURN_IF_ERROR(registry.Override<&MakeMine>("rms_norm", "mine"));
//   QUERN_ASSIGN_OR_RETURN(OpPolicy policy, OpPolicy::Parse("none,+rms_norm"));
//   OpDispatcher ops(registry, policy);
//   const TensorMeta x_meta{DType::kBF16, {tokens, hidden}};
//   QUERN_ASSIGN_OR_RETURN(MadeOp norm, ops.Make("rms_norm", {{"x", x_meta}}));
//   std::vector<AnyTensorView> tensors;  // kept from step to step
//   QUERN_RETURN_IF_ERROR(norm.Bind({{"x", x}, {"out", out}}, tensors));
//   norm.op->Execute(tensors, executor);
//
// How an operator is added: docs/writing_an_operator.md. A whole program with
// an override: examples/embed_workspace.
//
// A typed function makes an operator (Add, Override). In the example it is
//
//   absl::StatusOr<std::unique_ptr<BoundOp>> MakeMine(
//       const TensorMeta& x, const std::optional<TensorMeta>& weight,
//       double eps, int64_t var_hidden_size, const std::string& out_dtype);
//
// A function that infers shapes (Define) returns
// absl::StatusOr<std::vector<TensorMeta>> instead. The signature has all of the
// schema's parameters in their order:
//
//   Tensor            const TensorMeta&
//   Tensor(aN!)       const MutatedMeta&
//   Tensor?           const std::optional<TensorMeta>&
//   Tensor(aN!)?      const std::optional<MutatedMeta>&
//   int float bool    int64_t double bool     str  const std::string&
//   object, object?   T*, where OpObject<T> (op_arg.h) has the object's name:
//                     Communicator*, const LinearWeights*; null if left out
//
// A function whose signature differs from the schema is refused. A program that
// links a single kernel links nothing of the registry.

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
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_schema.h"
#include "quern/ops/registry/op_tensors.h"

namespace quern {

// A constructed operator, whose implementation has been chosen.
class BoundOp {
 public:
  virtual ~BoundOp() = default;

  // The instruction set, or "scalar" for implementations that do not choose
  // one.
  virtual const char* target() const = 0;
  // Describes what runs for so many rows, for a person to read: at least the
  // instruction set.
  virtual std::string Explain(int64_t /*rows*/) const { return target(); }
  // Gives the operator its weights, if it packs them; other tensors are not
  // read. Call it before CheckArgs and Execute, and again after the weights
  // have changed. Where the header of the operator's family says so, it reads
  // the lengths of a step instead, or makes an object. Their executors must not
  // have more workers than this one. Collective if the operator has ranks. Must
  // not run concurrently with another call. Most operators have nothing to do
  // here.
  virtual absl::Status Prepare(absl::Span<const AnyTensorView> /*tensors*/,
                               Executor& /*executor*/) {
    return absl::OkStatus();
  }

  // Whether Execute may be called with these tensors: those of the schema in
  // its order, with a default-constructed view for one that is omitted, then
  // the returned ones. InvalidArgument names the argument. The number of rows
  // may differ from the one that the operator was made with, unless the header
  // of its family says otherwise. MadeOp::CheckArgs has checked before what
  // OpTensors::Check refuses: dtypes, ranks, and tensors that overlap. A pair
  // that is declared in place (OpRules) is checked here.
  virtual absl::Status CheckArgs(
      absl::Span<const AnyTensorView> tensors) const = 0;

  // Bytes of workspace that Execute needs on up to max_workers workers, for up
  // to max_rows rows. OpTensors::Rows counts the rows of a step, and
  // MadeOp::WorkspaceBytes calls it. Most operators need none.
  virtual absl::StatusOr<int64_t> WorkspaceBytes(int64_t /*max_rows*/,
                                                 int /*max_workers*/) const {
    return 0;
  }
  // Writes the tensors that the schema marks as written, and the returned ones.
  // `workspace` has at least WorkspaceBytes and is free again afterwards, so
  // one workspace serves all operators of a step. Safe to call concurrently,
  // each call with its own workspace. Allocates nothing.
  virtual void Execute(absl::Span<const AnyTensorView> tensors,
                       Workspace workspace,
                       Executor& executor) const noexcept = 0;
  // Calls CheckArgs, and Execute if it accepts the tensors. A BoundPlan puts
  // the tensors into the arguments of its plan once for both.
  virtual absl::Status CheckAndExecute(absl::Span<const AnyTensorView> tensors,
                                       Workspace workspace,
                                       Executor& executor) const {
    QUERN_RETURN_IF_ERROR(CheckArgs(tensors));
    Execute(tensors, workspace, executor);
    return absl::OkStatus();
  }
  // Runs an operator that needs no workspace.
  void Execute(absl::Span<const AnyTensorView> tensors,
               Executor& executor) const noexcept {
    Execute(tensors, Workspace(), executor);
  }
};

using OpShapes = std::function<absl::StatusOr<std::vector<TensorMeta>>(
    absl::Span<const OpArg>)>;
// Constructs an operator. Unimplemented means that the arguments are not
// supported; the next provider is then tried, except after an override.
using OpFactory = std::function<absl::StatusOr<std::unique_ptr<BoundOp>>(
    absl::Span<const OpArg>)>;

// The parameter that a C++ type stands for, without name and default.
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
// The schema alone says whether an object is optional.
template <typename T>
struct OpParamOf<T*> {
  static OpParam Get() {
    return {"", OpType::kObject, false, false, {}, OpObject<T>::kName};
  }
  static T* From(const OpArg& arg) {
    const auto* ref = std::get_if<OpObjectRef>(&arg);
    // OpArg took a pointer to this type, so no const is cast away.
    return ref == nullptr ? nullptr
                          : static_cast<T*>(const_cast<void*>(ref->object));
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

// A function whose first parameter is a State that all its operators share.
template <auto kFunction>
struct SharingOp;
template <typename R, typename State, typename... A,
          R (*kFunction)(State&, A...)>
struct SharingOp<kFunction> {
  static std::vector<OpParam> Params() {
    return {OpParamOf<std::decay_t<A>>::Get()...};
  }
  static R Call(State& state, absl::Span<const OpArg> args) {
    return Unpack(state, args, std::index_sequence_for<A...>());
  }

 private:
  template <size_t... kIndex>
  static R Unpack(State& state, absl::Span<const OpArg> args,
                  std::index_sequence<kIndex...>) {
    return kFunction(state, OpParamOf<std::decay_t<A>>::From(args[kIndex])...);
  }
};

// Returns arguments that an operator accepts, for listings and tests. Tensors
// of free dtype have the given one.
using OpExample = std::function<NamedArgs(DType)>;

struct OpImplementation {
  std::string provider;  // "reference", "simd", "onednn", or an embedder's
  OpFactory factory;
};

// Layers are what vLLM calls pluggable (linear layers, embedding, head,
// logits, mixers), and what a model cannot do without: linear, experts,
// attention, sample. `none` does not disable them, only -op does.
enum class OpKind : uint8_t { kOperator, kLayer };

struct OpDefinition {
  OpSchema schema;
  OpRules rules;
  OpKind kind = OpKind::kOperator;
  OpShapes shapes;
  OpExample example = nullptr;
  // In order of preference: the first that accepts the arguments is chosen. The
  // reference is last.
  std::vector<OpImplementation> implementations;
  std::optional<OpImplementation> override_with;  // an embedder's
};

class OpRegistry {
 public:
  static constexpr absl::string_view kReference = "reference";

  // Adds an operator as a declaration (op_declaration.h) has made it.
  // InvalidArgument for rules that its schema does not bear; AlreadyExists if
  // the name is taken.
  absl::Status Define(OpDefinition definition);

  // Defines the operator of `schema`, whose returned shapes kShapes infers.
  // InvalidArgument if the text is not a schema or differs from the signature
  // of kShapes; AlreadyExists if the name is taken.
  template <auto kShapes>
  absl::Status Define(absl::string_view schema, OpExample example = nullptr,
                      OpKind kind = OpKind::kOperator) {
    return DefineTyped(schema, TypedOp<kShapes>::Params(),
                       &TypedOp<kShapes>::Call, example, kind);
  }
  // Sets the rules of the operator's tensors, for all of its implementations.
  // NotFound for an unknown operator; InvalidArgument for a tensor that the
  // schema does not have, and for a pair of which neither is written.
  absl::Status Declare(absl::string_view op, OpRules rules);
  // Adds an implementation after the existing ones, but before the reference.
  // NotFound for an unknown operator, AlreadyExists if the operator has such a
  // provider.
  template <auto kMake>
  absl::Status Add(absl::string_view op, absl::string_view provider) {
    return AddTyped(op, provider, TypedOp<kMake>::Params(),
                    &TypedOp<kMake>::Call);
  }
  // Like Add, for a function with one more parameter before the others, State&:
  // what its operators share, such as tables. It must be safe to use
  // concurrently.
  template <auto kMake, typename State>
  absl::Status AddSharing(std::shared_ptr<State> state, absl::string_view op,
                          absl::string_view provider) {
    return AddTyped(op, provider, SharingOp<kMake>::Params(),
                    [state = std::move(state)](absl::Span<const OpArg> args) {
                      return SharingOp<kMake>::Call(*state, args);
                    });
  }
  // Replaces all implementations of the operator while the policy enables it.
  // NotFound for an unknown operator, AlreadyExists if it is overridden
  // already.
  template <auto kMake>
  absl::Status Override(absl::string_view op, absl::string_view provider) {
    return OverrideTyped(op, provider, TypedOp<kMake>::Params(),
                         &TypedOp<kMake>::Call);
  }

  // Null for an unknown operator. The pointer is valid until the registry
  // changes.
  const OpDefinition* Find(absl::string_view op) const;
  // All operators' names, sorted.
  std::vector<std::string> Names() const;

  // Metadata of the tensors that the operator returns; reads no tensor data.
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
