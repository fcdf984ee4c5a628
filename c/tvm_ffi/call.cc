#include "quern/c/tvm_ffi/call.h"

#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "quern/c/quern.h"
#include "quern/c/tvm_ffi/state.h"
#include "quern/ops/registry/op_schema.h"

namespace quern {
namespace tvm_ffi {
namespace {

constexpr size_t kMostPlans = 32;
// Strings name things, such as a dtype or an activation.
constexpr size_t kMostText = 4096;

template <typename T>
void Append(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

class Call {
 public:
  Call(size_t index, const quern_tvm_value* args, int32_t count)
      : shared_(TheShared()),
        thread_(TheThread()),
        signature_(shared_.signatures[index]),
        workers_(shared_.workers()),
        args_(args) {
    if (!signature_.exists) {
      throw Refusal("RuntimeError", signature_.name +
                                        ": libquern.so has no such operator; "
                                        "need the libquern.so of this release");
    }
    if (count < 0 || static_cast<size_t>(count) < signature_.least ||
        static_cast<size_t>(count) > signature_.most) {
      throw Refusal("TypeError",
                    signature_.name + ": " + std::to_string(count) +
                        " arguments; need " + std::to_string(signature_.least) +
                        " to " + std::to_string(signature_.most) + ": " +
                        Usage());
    }
    if (args == nullptr && count > 0) {
      throw Refusal("ValueError", signature_.name + ": the arguments are null");
    }
    count_ = static_cast<size_t>(count);
    thread_.key.clear();
    Append(thread_.key, index);
    thread_.arguments.clear();
    thread_.operands.clear();
    thread_.texts.clear();
  }

  void Run() {
    Sort();
    Plan* plan = has_object_ ? nullptr : Find();
    std::list<Plan> made;
    if (plan == nullptr) {
      plan = &made.emplace_front();
      Make(*plan);
    }
    Execute(*plan);
    if (made.empty() || plan->prepared_by_each) return;
    plan->key = thread_.key;
    thread_.plans.splice(thread_.plans.begin(), made);
    if (thread_.plans.size() > kMostPlans) thread_.plans.pop_back();
  }

 private:
  std::string Usage() const {
    std::string usage = "(";
    for (const std::string& out : signature_.outs) {
      usage += (usage.size() > 1 ? ", " : "") + out;
    }
    for (const OpParam& param : signature_.schema.params) {
      usage += (usage.size() > 1 ? ", " : "") + param.name;
    }
    return usage + ")";
  }

  [[noreturn]] void Refuse(const char* kind, const std::string& name,
                           const std::string& why) const {
    throw Refusal(kind, signature_.name + ": " + name + why);
  }
  [[noreturn]] void WrongType(const std::string& name, int32_t type,
                              const char* need) const {
    Refuse("TypeError", name,
           " has tvm-ffi's type " + std::to_string(type) + "; need " + need);
  }

  // Null for None.
  const quern_tensor* TensorOf(const std::string& name,
                               const quern_tvm_value& value) const {
    if (value.type == QUERN_TVM_NONE) return nullptr;
    if (value.type != QUERN_TVM_DLTENSOR && value.type != QUERN_TVM_TENSOR) {
      WrongType(name, value.type, "a tensor, which is 7 or 70");
    }
    if (value.value.pointer == nullptr) Refuse("ValueError", name, " is null");
    const auto* at = static_cast<const char*>(value.value.pointer);
    if (value.type == QUERN_TVM_TENSOR) at += QUERN_TVM_HEADER;
    return reinterpret_cast<const quern_tensor*>(at);
  }

  // A copy that ends with 0 and lives as long as the call.
  const std::string& TextOf(const std::string& name,
                            const quern_tvm_value& value) {
    const char* data = value.value.small;
    size_t size = value.small_size < 8 ? value.small_size : 7;
    if (value.type == QUERN_TVM_RAW_TEXT) {
      data = value.value.text;
      size = data == nullptr ? 0 : strnlen(data, kMostText + 1);
    } else if (value.type == QUERN_TVM_TEXT) {
      quern_tvm_bytes bytes = {};
      if (value.value.pointer != nullptr) {
        std::memcpy(
            &bytes,
            static_cast<const char*>(value.value.pointer) + QUERN_TVM_HEADER,
            sizeof(bytes));
      }
      data = bytes.data;
      size = bytes.size;
    }
    if (data == nullptr) Refuse("ValueError", name, " is null");
    if (size > kMostText) {
      Refuse("ValueError", name,
             " is a string of more than " + std::to_string(kMostText) +
                 " bytes; need a shorter one");
    }
    if (std::memchr(data, 0, size) != nullptr) {
      Refuse("ValueError", name, " is a string with a zero byte; need none");
    }
    thread_.texts.push_back(std::make_unique<std::string>(data, size));
    return *thread_.texts.back();
  }

  // Operands that are left out are null, so that the others keep the places in
  // which they are found fastest.
  void AddTensor(const std::string& name, const quern_tensor* tensor,
                 bool made_with) {
    thread_.operands.push_back({name.c_str(), tensor, 0});
    if (!made_with) return;
    Append(thread_.key, tensor == nullptr ? int32_t{-1} : tensor->ndim);
    if (tensor == nullptr) return;
    Append(thread_.key, tensor->dtype);
    // Another rank, or no shape, is refused where the operator is made, so no
    // plan has such a key.
    if (tensor->shape != nullptr && tensor->ndim > 0 && tensor->ndim < 8) {
      thread_.key.append(reinterpret_cast<const char*>(tensor->shape),
                         static_cast<size_t>(tensor->ndim) * sizeof(int64_t));
    }
    thread_.arguments.push_back(quern_tensor_argument(name.c_str(), tensor));
  }

  void AddOther(const OpParam& param, const quern_tvm_value& value) {
    const char* const name = param.name.c_str();
    Append(thread_.key, value.type);
    std::vector<quern_argument>& list = thread_.arguments;
    switch (value.type) {
      case QUERN_TVM_NONE:
        return;
      case QUERN_TVM_INT:
      case QUERN_TVM_BOOL:
        Append(thread_.key, value.value.integer);
        list.push_back(quern_int_argument(name, value.value.integer));
        if (value.type == QUERN_TVM_BOOL || param.type == OpType::kBool) {
          list.back().type = QUERN_ARGUMENT_BOOL;
        }
        return;
      case QUERN_TVM_FLOAT:
        Append(thread_.key, value.value.real);
        list.push_back(quern_float_argument(name, value.value.real));
        return;
      case QUERN_TVM_OPAQUE:
        has_object_ = has_object_ || value.value.pointer != nullptr;
        list.push_back(quern_object_argument(name, value.value.pointer));
        return;
      case QUERN_TVM_SMALL_TEXT:
      case QUERN_TVM_RAW_TEXT:
      case QUERN_TVM_TEXT: {
        const std::string& text = TextOf(param.name, value);
        list.push_back(quern_text_argument(name, text.c_str()));
        Append(thread_.key, text.size());
        thread_.key += text;
        return;
      }
      default:
        WrongType(param.name, value.type,
                  "an int, a bool, a float, a string or an opaque pointer");
    }
  }

  // Divides the arguments into those that the operator is made with, which are
  // the key, and its operands, in the order in which they are found fastest.
  void Sort() {
    const size_t outs = signature_.outs.size();
    const quern_tvm_value none = {};
    size_t at = outs;
    for (const OpParam& param : signature_.schema.params) {
      const quern_tvm_value& value = at < count_ ? args_[at] : none;
      ++at;
      if (param.type == OpType::kTensor) {
        AddTensor(param.name, TensorOf(param.name, value), true);
      } else {
        AddOther(param, value);
      }
    }
    for (size_t i = 0; i < outs; ++i) {
      AddTensor(signature_.outs[i], TensorOf(signature_.outs[i], args_[i]),
                false);
    }
  }

  Plan* Find() {
    for (auto plan = thread_.plans.begin(); plan != thread_.plans.end();
         ++plan) {
      if (plan->key != thread_.key) continue;
      thread_.plans.splice(thread_.plans.begin(), thread_.plans, plan);
      return &*plan;
    }
    return nullptr;
  }

  quern_status Size(Plan& plan) const {
    const quern_status status = quern_op_workspace_bytes(
        plan.op, plan.rows, workers_.executor, &plan.bytes);
    if (status == QUERN_OK) plan.sized_for = workers_.set;
    return status;
  }

  void Make(Plan& plan) {
    {
      const std::lock_guard<std::mutex> lock(shared_.of_library);
      Require(quern_op_create(shared_.library, signature_.name.c_str(), nullptr,
                              thread_.arguments.data(),
                              thread_.arguments.size(), &plan.op),
              shared_.library);
    }
    Require(quern_op_rows(plan.op, nullptr, 0, &plan.rows), plan.op);
    plan.prepared_by_each = has_object_;
    if (has_object_) return;
    const quern_status sized = Size(plan);
    // An operator that must be prepared says so when it is asked for its
    // workspace.
    plan.prepared_by_each = sized == QUERN_FAILED_PRECONDITION;
    if (!plan.prepared_by_each) Require(sized, plan.op);
  }

  void Execute(Plan& plan) {
    const std::vector<quern_operand>& operands = thread_.operands;
    if (plan.prepared_by_each) {
      Require(quern_op_prepare(plan.op, operands.data(), operands.size(),
                               workers_.executor),
              plan.op);
    }
    if (plan.prepared_by_each || plan.sized_for != workers_.set) {
      Require(Size(plan), plan.op);
    }
    thread_.Grow(static_cast<size_t>(plan.bytes));
    Require(
        quern_op_execute(plan.op, operands.data(), operands.size(),
                         thread_.workspace, thread_.bytes, workers_.executor),
        plan.op);
  }

  Shared& shared_;
  Thread& thread_;
  const Signature& signature_;
  const Workers workers_;
  const quern_tvm_value* const args_;
  size_t count_ = 0;
  bool has_object_ = false;
};

}  // namespace

void CallOp(size_t index, const quern_tvm_value* args, int32_t count) {
  Call(index, args, count).Run();
}

}  // namespace tvm_ffi
}  // namespace quern
