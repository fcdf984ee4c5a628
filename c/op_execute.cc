// What is done with an operator: prepare, workspace, execute.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "absl/container/fixed_array.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "quern/c/object.h"
#include "quern/c/objects/executor.h"
#include "quern/c/op.h"
#include "quern/c/quern.h"
#include "quern/c/tensor.h"
#include "quern/core/executor.h"
#include "quern/core/status_macros.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_tensors.h"

namespace quern {
namespace c_abi {
namespace {

using Views = absl::FixedArray<AnyTensorView, kMaxTensors>;
// The objects that one execution uses.
using Used = absl::FixedArray<Borrowed, 4>;

absl::Status NoSuchTensor(const OperatorObject& op, const char* name) {
  const OpTensors& tensors = op.made.tensors;
  std::string names;
  for (size_t i = 0; i < tensors.size(); ++i) {
    absl::StrAppend(&names, names.empty() ? "" : ", ", tensors.name(i));
  }
  return InvalidArgument(op.name, "has no tensor ", name, "; need ", names);
}

// Puts operands in order by name. The i-th operand is looked for from the i-th
// tensor on, so operands in order cost one comparison each.
absl::Status Arrange(const OperatorObject& op, const quern_operand* operands,
                     size_t count, Views& views) {
  if (count > 0 && operands == nullptr) {
    return InvalidArgument(op.name, "operands is null; need ", count,
                           " of them");
  }
  const OpTensors& tensors = op.made.tensors;
  const size_t size = tensors.size();
  for (size_t i = 0; i < count; ++i) {
    const quern_operand& operand = operands[i];
    if (operand.name == nullptr) {
      return InvalidArgument(op.name, "operand ", i, " has a null name");
    }
    size_t at = size == 0 ? 0 : i % size, looked = 0;
    while (looked < size &&
           std::strcmp(tensors.name(at).c_str(), operand.name) != 0) {
      at = at + 1 == size ? 0 : at + 1;
      ++looked;
    }
    if (looked == size) return NoSuchTensor(op, operand.name);
    if (operand.tensor == nullptr) continue;
    if (views[at].rank() != 0) {
      return InvalidArgument(op.name, operand.name, " is given twice");
    }
    QUERN_RETURN_IF_ERROR(SetView(op.name, operand.name, *operand.tensor,
                                  operand.flags, views[at]));
  }
  return absl::OkStatus();
}

absl::Status CheckWorkspace(const OperatorObject& op,
                            absl::Span<const AnyTensorView> views,
                            const void* workspace, size_t bytes, int workers) {
  QUERN_ASSIGN_OR_RETURN(const int64_t need,
                         op.made.WorkspaceBytes(views, workers));
  if (need == 0) return absl::OkStatus();
  if (workspace == nullptr || bytes < static_cast<uint64_t>(need)) {
    return InvalidArgument(op.name, "workspace has ",
                           workspace == nullptr ? 0 : bytes, " bytes; need ",
                           need, ", as quern_op_workspace_bytes says");
  }
  if (reinterpret_cast<uintptr_t>(workspace) % QUERN_ALIGNMENT == 0) {
    return absl::OkStatus();
  }
  return InvalidArgument(
      op.name, "workspace is misaligned; need a multiple of ", QUERN_ALIGNMENT);
}

// Uses the objects that the operator reads and that may change.
absl::Status UseChanging(const OperatorObject& op, Used& used,
                         Mode mode = Mode::kUseOfHeld) {
  for (size_t i = 0; i < op.changing.size(); ++i) {
    QUERN_RETURN_IF_ERROR(used[i].Take(*op.changing[i], mode));
  }
  return absl::OkStatus();
}

absl::Status Prepare(OperatorObject& op, const quern_operand* operands,
                     size_t count, quern_executor* handle) {
  CallExecutor executor;
  QUERN_RETURN_IF_ERROR(executor.Take(handle));
  Used used(op.changing.size());
  QUERN_RETURN_IF_ERROR(
      UseChanging(op, used, op.fills ? Mode::kChange : Mode::kUseOfHeld));
  Views views(op.made.tensors.size());
  QUERN_RETURN_IF_ERROR(Arrange(op, operands, count, views));
  QUERN_RETURN_IF_ERROR(op.made.Prepare(views, executor.get()));
  op.prepared_workers = executor.get().num_workers();
  const absl::Status verdict = executor.Verdict();
  op.half_prepared = !verdict.ok();
  return verdict;
}

absl::Status Execute(const OperatorObject& op, const quern_operand* operands,
                     size_t count, void* workspace, size_t bytes,
                     quern_executor* handle) {
  CallExecutor executor;
  QUERN_RETURN_IF_ERROR(executor.Take(
      handle, op.orders ? BrokenForks::kFinish : BrokenForks::kReport));
  const int workers = executor.get().num_workers();
  if (op.half_prepared) {
    return absl::FailedPreconditionError(absl::StrCat(
        op.name, ": quern_op_prepare was left half done; need it to succeed"));
  }
  if (op.prepared_workers != 0 && workers > op.prepared_workers) {
    return InvalidArgument(op.name, "the executor has ", workers,
                           " workers; need ", op.prepared_workers,
                           " or fewer, as quern_op_prepare was given");
  }
  Used used(op.changing.size());
  QUERN_RETURN_IF_ERROR(UseChanging(op, used));
  Views views(op.made.tensors.size());
  QUERN_RETURN_IF_ERROR(Arrange(op, operands, count, views));
  const absl::Status fits =
      CheckWorkspace(op, views, workspace, bytes, workers);
  if (!fits.ok()) {
    // The refusal of a tensor comes first.
    QUERN_RETURN_IF_ERROR(op.made.CheckArgs(views));
    return fits;
  }
  // An operator that needs no workspace may be given any pointer.
  const bool usable =
      workspace != nullptr &&
      reinterpret_cast<uintptr_t>(workspace) % QUERN_ALIGNMENT == 0;
  QUERN_RETURN_IF_ERROR(op.made.CheckAndExecute(
      views, usable ? Workspace(workspace, bytes) : Workspace(),
      executor.get()));
  return executor.Verdict();
}

absl::Status Rows(const OperatorObject& op, const quern_operand* operands,
                  size_t count, int64_t* rows) {
  QUERN_RETURN_IF_ERROR(CheckNotNull(op.name, "rows", rows));
  *rows = op.made.tensors.made_rows();
  if (count == 0) return absl::OkStatus();
  Views views(op.made.tensors.size());
  QUERN_RETURN_IF_ERROR(Arrange(op, operands, count, views));
  *rows = op.made.tensors.Rows(views);
  return absl::OkStatus();
}

absl::Status WorkspaceBytes(const OperatorObject& op, int64_t max_rows,
                            quern_executor* handle, int64_t* bytes) {
  QUERN_RETURN_IF_ERROR(CheckNotNull(op.name, "bytes", bytes));
  *bytes = 0;
  QUERN_RETURN_IF_ERROR(CheckAtLeast(op.name, "max_rows", max_rows, 0));
  CallExecutor executor;
  QUERN_RETURN_IF_ERROR(executor.Take(handle));
  Used used(op.changing.size());
  QUERN_RETURN_IF_ERROR(UseChanging(op, used));
  const auto need =
      op.made.op->WorkspaceBytes(max_rows, executor.get().num_workers());
  if (!need.ok()) return op.made.tensors.InWords(need.status());
  *bytes = *need;
  return absl::OkStatus();
}

absl::Status Returned(OperatorObject& op, size_t index, quern_tensor* tensor) {
  QUERN_RETURN_IF_ERROR(CheckNotNull(op.name, "tensor", tensor));
  if (index >= op.returns.size()) {
    return absl::NotFoundError(absl::StrCat(op.name, ": index=", index,
                                            "; it returns ", op.returns.size(),
                                            " tensors"));
  }
  TensorMeta& meta = op.returns[index];
  *tensor = quern_dense(nullptr, ToC(meta.dtype),
                        static_cast<int32_t>(meta.extents.size()),
                        meta.extents.data());
  return absl::OkStatus();
}

template <typename Fn>
quern_status With(quern_op* handle, Mode mode, const Fn& fn) {
  return CallOn<OperatorObject>(handle, Kind::kOp, mode, fn);
}

}  // namespace
}  // namespace c_abi
}  // namespace quern

using quern::c_abi::Mode;
using quern::c_abi::OperatorObject;

extern "C" {

quern_status quern_op_returned(quern_op* op, size_t index,
                               quern_tensor* tensor) {
  return quern::c_abi::With(op, Mode::kUse, [&](OperatorObject& o) {
    return quern::c_abi::Returned(o, index, tensor);
  });
}

quern_status quern_op_prepare(quern_op* op, const quern_operand* operands,
                              size_t num_operands, quern_executor* executor) {
  return quern::c_abi::With(op, Mode::kChange, [&](OperatorObject& o) {
    return quern::c_abi::Prepare(o, operands, num_operands, executor);
  });
}

quern_status quern_op_rows(quern_op* op, const quern_operand* operands,
                           size_t num_operands, int64_t* rows) {
  return quern::c_abi::With(op, Mode::kUse, [&](const OperatorObject& o) {
    return quern::c_abi::Rows(o, operands, num_operands, rows);
  });
}

quern_status quern_op_workspace_bytes(quern_op* op, int64_t max_rows,
                                      quern_executor* executor,
                                      int64_t* bytes) {
  return quern::c_abi::With(op, Mode::kUse, [&](const OperatorObject& o) {
    return quern::c_abi::WorkspaceBytes(o, max_rows, executor, bytes);
  });
}

quern_status quern_op_execute(quern_op* op, const quern_operand* operands,
                              size_t num_operands, void* workspace,
                              size_t workspace_bytes,
                              quern_executor* executor) {
  return quern::c_abi::With(op, Mode::kUse, [&](const OperatorObject& o) {
    return quern::c_abi::Execute(o, operands, num_operands, workspace,
                                 workspace_bytes, executor);
  });
}

}  // extern "C"
