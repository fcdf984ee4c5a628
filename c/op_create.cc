// How operators are made by name.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/c/library.h"
#include "quern/c/object.h"
#include "quern/c/objects/attention.h"
#include "quern/c/objects/named.h"
#include "quern/c/objects/rotary_scaling.h"
#include "quern/c/objects/weights.h"
#include "quern/c/op.h"
#include "quern/c/quern.h"
#include "quern/c/tensor.h"
#include "quern/core/status_macros.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {
namespace c_abi {
namespace {

// More than any schema has.
constexpr size_t kMaxArguments = 64;

// Objects that are read while the operator is made.
using Reads = std::vector<Borrowed>;

// The object that `handle` stands for, as an argument; holds it.
absl::StatusOr<OpArg> ObjectArg(const Library& library, absl::string_view op,
                                const char* name, void* handle,
                                OperatorObject& made, Reads& reads) {
  Slot* const slot = SlotOf(handle);
  if (slot == nullptr) {
    return InvalidArgument(op, name,
                           " is no object; need one that quern.h made");
  }
  Borrowed object;
  if (absl::Status taken = object.Take(*slot, Mode::kHold); !taken.ok()) {
    return absl::Status(taken.code(),
                        absl::StrCat(op, ": ", name, ": ", taken.message()));
  }
  if (slot->library != &library) {
    return InvalidArgument(op, name, kOtherLibrary);
  }
  OpArg arg;
  const Kind kind = slot->kind.load(std::memory_order_relaxed);
  switch (kind) {
    case Kind::kLinearWeights:
      arg = OpArg(&object.As<WeightsObject>().weights());
      break;
    case Kind::kKvCache:
      arg = OpArg(&object.As<KvCacheObject>().layout());
      break;
    case Kind::kSchedule:
      arg = OpArg(&object.As<ScheduleObject>().step());
      made.changing.push_back(slot);
      break;
    case Kind::kOneDnnHandler:
      // The operator reads it while it is made, when no other call may fill it.
      QUERN_RETURN_IF_ERROR(reads.emplace_back().Take(*slot, Mode::kUse));
      arg = OpArg(&object.As<HandlerObject>().handler());
      if (made.fills) made.changing.push_back(slot);
      break;
    case Kind::kSchedulerMetadata:
      QUERN_RETURN_IF_ERROR(reads.emplace_back().Take(*slot, Mode::kUse));
      arg = OpArg(&object.As<MetadataObject>().metadata());
      made.changing.push_back(slot);
      break;
    case Kind::kExpertWeights:
      arg = OpArg(&object.As<ExpertsObject>().experts());
      made.orders = true;
      break;
    case Kind::kRotaryScaling:
      arg = OpArg(&object.As<RotaryScalingObject>().scaling());
      break;
    default:
      return InvalidArgument(op, name, " is of kind ", KindName(kind),
                             "; need an object that an operator takes");
  }
  made.held.push_back(std::move(object));
  return arg;
}

// Whether Prepare of this operator writes to its object.
bool Fills(absl::string_view op) {
  for (const char* fills :
       {"create_onednn_mm", "create_onednn_mm_handler",
        "create_onednn_scaled_mm", "create_onednn_scaled_mm_handler",
        "cpu_attn_get_scheduler_metadata", "get_scheduler_metadata"}) {
    if (op == fills) return true;
  }
  return false;
}

absl::StatusOr<OpArg> ArgOf(const Library& library, absl::string_view op,
                            const quern_argument& a, OperatorObject& made,
                            Reads& reads) {
  switch (a.type) {
    case QUERN_ARGUMENT_TENSOR: {
      if (a.value.tensor == nullptr) return OpArg();
      QUERN_ASSIGN_OR_RETURN(TensorMeta meta,
                             MetaOf(op, a.name, *a.value.tensor));
      return OpArg(std::move(meta));
    }
    case QUERN_ARGUMENT_INT:
      return OpArg(a.value.integer);
    case QUERN_ARGUMENT_FLOAT:
      return OpArg(a.value.real);
    case QUERN_ARGUMENT_BOOL:
      if (a.value.integer == 0 || a.value.integer == 1) {
        return OpArg(a.value.integer == 1);
      }
      return InvalidArgument(op, a.name, "=", a.value.integer,
                             " is a bool; need 0 or 1");
    case QUERN_ARGUMENT_TEXT:
      if (a.value.text != nullptr) return OpArg(a.value.text);
      return InvalidArgument(op, a.name, " is a null text");
    case QUERN_ARGUMENT_OBJECT:
      if (a.value.object == nullptr) return OpArg();
      return ObjectArg(library, op, a.name, a.value.object, made, reads);
    default:
      return InvalidArgument(op, a.name, " has type=", a.type, "; need ",
                             int{QUERN_ARGUMENT_TENSOR}, " to ",
                             int{QUERN_ARGUMENT_OBJECT});
  }
}

absl::StatusOr<NamedArgs> ArgsOf(const Library& library, absl::string_view op,
                                 const quern_argument* arguments, size_t count,
                                 OperatorObject& made, Reads& reads) {
  NamedArgs args;
  if (count > kMaxArguments) {
    return InvalidArgument(op, "num_arguments=", count, "; need ",
                           kMaxArguments, " or fewer");
  }
  if (count > 0 && arguments == nullptr) {
    return InvalidArgument(op, "arguments is null; need ", count, " of them");
  }
  for (size_t i = 0; i < count; ++i) {
    if (arguments[i].name == nullptr) {
      return InvalidArgument(op, "argument ", i, " has a null name");
    }
    if (arguments[i].reserved != 0) {
      return InvalidArgument(op, arguments[i].name,
                             " has reserved=", arguments[i].reserved,
                             "; need 0");
    }
    QUERN_ASSIGN_OR_RETURN(OpArg arg,
                           ArgOf(library, op, arguments[i], made, reads));
    args.emplace_back(arguments[i].name, std::move(arg));
  }
  return args;
}

absl::StatusOr<std::unique_ptr<Object>> Make(const Library& library,
                                             const char* name,
                                             const quern_op_options* options,
                                             const quern_argument* arguments,
                                             size_t num_arguments) {
  QUERN_RETURN_IF_ERROR(CheckNotNull("quern_op_create", "name", name));
  const char* provider = nullptr;
  if (options != nullptr) {
    QUERN_RETURN_IF_ERROR(
        CheckSize("quern_op_options", options->size, sizeof(quern_op_options)));
    provider = options->provider;
  }
  auto made = std::make_unique<OperatorObject>();
  made->name = name;
  made->fills = Fills(name);
  Reads reads;
  QUERN_ASSIGN_OR_RETURN(
      const NamedArgs args,
      ArgsOf(library, name, arguments, num_arguments, *made, reads));
  const OpDispatcher& ops = library.ops();
  auto op = provider == nullptr ? ops.Make(name, args)
                                : ops.MakeFrom(provider, name, args);
  if (!op.ok()) return op.status();
  made->made = *std::move(op);
  if (made->made.tensors.size() > kMaxTensors) {
    return absl::InternalError(
        absl::StrCat(name, ": has ", made->made.tensors.size(),
                     " tensors; need ", kMaxTensors, " or fewer"));
  }
  QUERN_ASSIGN_OR_RETURN(made->returns,
                         library.registry().InferShapes(name, args));
  return std::unique_ptr<Object>(std::move(made));
}

}  // namespace
}  // namespace c_abi
}  // namespace quern

using quern::c_abi::Kind;
using quern::c_abi::Library;

extern "C" {

quern_status quern_op_create(quern_library* library, const char* name,
                             const quern_op_options* options,
                             const quern_argument* arguments,
                             size_t num_arguments, quern_op** op) {
  return quern::c_abi::MakeObject(
      library, "quern_op_create", Kind::kOp, op, [&](const Library& owner) {
        return quern::c_abi::Make(owner, name, options, arguments,
                                  num_arguments);
      });
}

}  // extern "C"
