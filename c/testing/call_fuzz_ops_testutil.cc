// Operators by name: made, prepared and executed.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/quern_named.h"
#include "quern/c/tensor.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/c/testing/call_fuzz_testutil.h"
#include "quern/core/dtype.h"
#include "quern/gemm/linear_weights.h"
#include "quern/models/gguf/mutate_testutil.h"
#include "quern/ops/moe/experts.h"
#include "quern/ops/registry/all_ops.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_schema.h"
#include "quern/testing/data.h"
#include "quern/testing/guard_buffer.h"

namespace quern {

OpCaller::OpCaller(Running running) : running_(running) {
  EXPECT_EQ(RegisterAllOps(registry_), absl::OkStatus());
  names_ = registry_.Names();
}

void OpCaller::RunCase(uint64_t seed, int calls) {
  const LibraryInC library, other;
  rng_ = Rng(seed);
  library_ = library.get();
  other_ = other.get();
  for (std::vector<void*>& handles : handles_) handles.clear();
  made_.clear();
  weights_of_.clear();
  MakeGoodObjects();
  for (int i = 0; i < calls && !testing::Test::HasFailure(); ++i) CallAny();
}

bool OpCaller::Done(quern_status status, const void* object) {
  if (status == QUERN_OK) {
    ++done;
    return true;
  }
  ++refused;
  const std::string message = MessageOf(object);
  // A caller's executor that breaks its promise is reported as a bug.
  EXPECT_TRUE(status == QUERN_INVALID_ARGUMENT || status == QUERN_NOT_FOUND ||
              status == QUERN_RESOURCE_EXHAUSTED ||
              status == QUERN_FAILED_PRECONDITION ||
              status == QUERN_UNIMPLEMENTED ||
              (status == QUERN_INTERNAL &&
               message.find("parallel_for") != std::string::npos))
      << call_ << ": " << status << ": " << message;
  EXPECT_GT(message.size(), 8u) << call_ << ": " << status;
  return false;
}

void* OpCaller::WeightsLike(const std::string& op,
                            const LinearWeights& weights) {
  void*& found = weights_of_[op];
  if (found != nullptr) return found;
  quern_linear_weights* adopted = nullptr;
  EXPECT_C_OK(quern_linear_weights_adopt(library_, weights.bytes().data(),
                                         weights.bytes().size(), &adopted),
              library_);
  return found = adopted;
}

void* OpCaller::ExpertsLike(const ExpertWeights& experts) {
  void*& found = weights_of_["ExpertWeights"];
  if (found != nullptr) return found;
  std::vector<quern_linear_weights*> gate_up, down;
  for (size_t e = 0; e < experts.gate_up.size(); ++e) {
    for (auto [from, to] : {std::pair(&experts.gate_up[e], &gate_up),
                            std::pair(&experts.down[e], &down)}) {
      quern_linear_weights* adopted = nullptr;
      EXPECT_C_OK(quern_linear_weights_adopt(library_, from->bytes().data(),
                                             from->bytes().size(), &adopted),
                  library_);
      to->push_back(adopted);
    }
  }
  quern_expert_weights* made = nullptr;
  EXPECT_C_OK(quern_expert_weights_create(library_, gate_up.data(), down.data(),
                                          down.size(), &made),
              library_);
  return found = made;
}

void* OpCaller::ObjectFor(const std::string& op, const OpObjectRef& ref) {
  if (OneIn(24)) return Any(static_cast<int>(rng_.Integer(0, kKinds - 1)));
  const std::string type = ref.type;
  if (type == "LinearWeights") {
    if (OneIn(8)) return Any(kWeights);
    return WeightsLike(op, *static_cast<const LinearWeights*>(ref.object));
  }
  if (type == "ExpertWeights") {
    if (OneIn(8)) return Any(kExperts);
    return ExpertsLike(*static_cast<const ExpertWeights*>(ref.object));
  }
  if (type == "KvLayout") return OneIn(4) ? Any(kCaches) : handles_[kCaches][0];
  if (type == "AttentionStep") {
    return OneIn(4) ? Any(kSchedules) : handles_[kSchedules][0];
  }
  if (type == "OneDnnHandler") return Any(kHandlers);
  if (type == "SchedulerMetadata") return Any(kMetadata);
  return nullptr;
}

void OpCaller::CreateOp() {
  const std::string& name = Pick(names_);
  const OpDefinition& definition = *registry_.Find(name);
  constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
  const NamedArgs example = definition.example(kDTypes[At(rng_, 3)]);
  const bool hostile = OneIn(3);
  const auto now = [&] { return hostile && OneIn(6); };
  Made made;
  std::vector<std::string> texts;
  texts.reserve(2 * example.size() + 2);
  std::vector<std::shared_ptr<Tensor>> tensors;
  std::vector<quern_argument> arguments;
  std::map<std::string, TensorMeta> metas;
  // Rows of the example in two dimensions, which some operators fold.
  const bool folded = OneIn(6);
  for (const auto& [key, arg] : example) {
    if (now() && OneIn(3)) continue;
    const char* const n = texts.emplace_back(key).c_str();
    quern_argument a = quern_argument_of(n, 0);
    if (const auto* meta = std::get_if<TensorMeta>(&arg)) {
      tensors.push_back(MakeTensor(folded ? Folded(*meta) : *meta, now()));
      metas[std::string(key)] = {meta->dtype, tensors.back()->shape};
      a = quern_tensor_argument(n, &tensors.back()->c);
    } else if (const auto* i = std::get_if<int64_t>(&arg)) {
      a = quern_int_argument(n, now() ? Edge() : *i);
    } else if (const auto* x = std::get_if<double>(&arg)) {
      a = quern_float_argument(n, now() ? static_cast<double>(Edge()) : *x);
    } else if (const auto* yes = std::get_if<bool>(&arg)) {
      a = quern_bool_argument(n, now() ? OneIn(2) : *yes);
      if (now()) a.value.integer = Edge();
    } else if (const auto* text = std::get_if<std::string>(&arg)) {
      a = quern_text_argument(
          n, texts.emplace_back(now() ? "no_such" : *text).c_str());
    } else if (const auto* ref = std::get_if<OpObjectRef>(&arg)) {
      a = quern_object_argument(n, ObjectFor(name, *ref));
    }
    if (now()) a.reserved = OneIn(4) ? 1 : 0;
    if (now() && OneIn(4)) a.name = nullptr;
    if (now() && OneIn(3)) {
      a = quern_int_argument(n, Edge());
      // A pointer is never made from a number.
      a.type = static_cast<int32_t>(
          rng_.Integer(QUERN_ARGUMENT_INT, QUERN_ARGUMENT_BOOL));
    }
    arguments.push_back(a);
    if (now() && OneIn(4)) arguments.push_back(a);
  }
  if (hostile && OneIn(3)) {
    // A parameter that the example leaves at its default.
    const auto& params = definition.schema.params;
    const OpParam& param = params[At(rng_, params.size())];
    if (param.type == OpType::kInt || param.type == OpType::kFloat) {
      arguments.push_back(
          quern_int_argument(texts.emplace_back(param.name).c_str(), Edge()));
    }
  }
  auto options = Sized<quern_op_options>();
  constexpr const char* kProviders[] = {"simd", "reference", "onednn", ""};
  options.provider = OneIn(3) ? kProviders[At(rng_, 4)] : nullptr;
  quern_library* const library = AnyLibrary();
  Begin("op_create " + name);
  const bool ok = Keep(
      Done(quern_op_create(library, now() && OneIn(4) ? nullptr : name.c_str(),
                           OneIn(2) ? nullptr : &options,
                           now() && OneIn(6) ? nullptr : arguments.data(),
                           arguments.size(), &made.op),
           library),
      kOps, made.op);
  if (!ok) return;
  for (const OpParam& param : definition.schema.params) {
    if (param.type != OpType::kTensor) continue;
    const auto found = metas.find(param.name);
    if (found != metas.end()) made.tensors.push_back(*found);
  }
  for (size_t i = 0;; ++i) {
    quern_tensor returned = {};
    if (quern_op_returned(made.op, i, &returned) != QUERN_OK) break;
    TensorMeta meta;
    for (int d = 0; d < 9; ++d) {
      constexpr DType kAll[] = {DType::kF32, DType::kBF16,   DType::kF16,
                                DType::kI32, DType::kI64,    DType::kI8,
                                DType::kU8,  DType::kF8E4M3, DType::kF8E5M2};
      const quern_dtype c = c_abi::ToC(kAll[d]);
      if (std::memcmp(&c, &returned.dtype, sizeof(c)) == 0)
        meta.dtype = kAll[d];
    }
    meta.extents.assign(returned.shape, returned.shape + returned.ndim);
    made.tensors.emplace_back(
        definition.schema.returns == 1 ? "out" : "out" + std::to_string(i),
        meta);
  }
  made.tensors.shrink_to_fit();
  made_.push_back(std::move(made));
}

TensorMeta OpCaller::Folded(TensorMeta meta) {
  std::vector<int64_t>& extents = meta.extents;
  if (extents.size() >= 2 && extents[0] % 2 == 0) {
    extents[0] /= 2;
    extents.insert(extents.begin() + 1, 2);
  }
  return meta;
}

TensorMeta OpCaller::Batched(TensorMeta meta) {
  if (meta.extents.size() > 1) meta.extents.insert(meta.extents.begin(), 2);
  return meta;
}

void OpCaller::UseOp(Made& made) {
  const bool hostile = OneIn(2);
  std::vector<std::shared_ptr<Tensor>> tensors;
  std::vector<quern_operand> operands;
  const size_t spoilt = At(rng_, made.tensors.size() + 1);
  // All tensors with a dimension more, as if the caller had batches.
  const bool batched = hostile && OneIn(8);
  const bool shared = OneIn(6);
  for (size_t i = 0; i < made.tensors.size(); ++i) {
    if (hostile && OneIn(24)) continue;
    const auto& [name, meta] = made.tensors[i];
    tensors.push_back(
        MakeTensor(batched ? Batched(meta) : meta, hostile && i == spoilt));
    if (shared && OneIn(2)) Share(tensors);
    quern_operand o = {name.c_str(), OrNull(&tensors.back()->c), 0};
    if (hostile && OneIn(16)) o.flags = OneIn(2) ? QUERN_READ_ONLY : 2;
    if (hostile && OneIn(40)) o.name = OneIn(2) ? nullptr : "nothing";
    operands.push_back(o);
    if (hostile && OneIn(60)) operands.push_back(o);
  }
  auto* const executor = Any<quern_executor>(kExecutors);
  const std::string what = ExplanationOf(made.op);
  const auto as_before = [&] {
    for (const auto& tensor : tensors) {
      EXPECT_TRUE(std::equal(tensor->before.begin(), tensor->before.end(),
                             tensor->memory->data()))
          << call_ << ": " << MessageOf(made.op);
    }
  };
  quern_operand* const list = operands.empty() ? nullptr : operands.data();
  if (OneIn(3)) {
    Begin("op_prepare " + what);
    const bool ok = Done(
        quern_op_prepare(made.op, list, operands.size(), executor), made.op);
    if (ok) made.prepared = tensors;
  }
  const int64_t rows =
      Number(made.tensors.empty() || made.tensors[0].second.extents.empty()
                 ? 1
                 : made.tensors[0].second.extents[0]);
  int64_t bytes = 0;
  Begin("op_workspace_bytes " + what);
  if (!Done(quern_op_workspace_bytes(made.op, rows, executor, OrNull(&bytes)),
            made.op)) {
    return;
  }
  if (bytes < 0 || bytes > (int64_t{1} << 26)) bytes = 4096;
  if (OneIn(24)) bytes = bytes > 0 ? bytes - 1 : 64;
  // Ends at a page, up to the alignment.
  GuardBuffer<uint8_t> workspace((bytes + 63) / 64 * 64);
  uint8_t* const at = workspace.data() + (OneIn(24) ? 1 : 0);
  const auto size = static_cast<size_t>(
      at == workspace.data() ? bytes : (bytes > 64 ? bytes - 1 : 0));
  Begin("op_execute " + what);
  const quern_status status =
      quern_op_execute(OneIn(40) ? nullptr : made.op, list, operands.size(),
                       OrNull(at), size, executor);
  if (status == QUERN_OK) {
    alarm(0);
    ++done;
    ++executed[what.substr(0, what.find(' '))];
  } else {
    alarm(0);
    ++refused;
    if (status != QUERN_INTERNAL) as_before();
  }
}

}  // namespace quern
