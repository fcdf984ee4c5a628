// The functions of libquern_tvm_ffi.so, called by tvm-ffi's convention with a
// stub in the place of its runtime: every operator of the registry is there,
// and has the bits and the refusals of the C++ operator.

#include "quern/c/tvm_ffi/tvm_ffi.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/tensor.h"
#include "quern/c/testing/example_testutil.h"
#include "quern/c/testing/symbols_testutil.h"
#include "quern/c/tvm_ffi/tvm_ffi_testutil.h"
#include "quern/core/aligned_buffer.h"
#include "quern/core/dtype.h"
#include "quern/core/executor.h"
#include "quern/core/tensor_view.h"
#include "quern/core/workspace.h"
#include "quern/gemm/linear_weights.h"
#include "quern/models/gguf/mutate_testutil.h"
#include "quern/ops/registry/all_ops.h"
#include "quern/ops/registry/op_arg.h"
#include "quern/ops/registry/op_dispatcher.h"
#include "quern/ops/registry/op_policy.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_schema.h"
#include "quern/testing/data.h"

namespace quern {
namespace {

TEST(TvmFfiTest, HasAFunctionForEveryOperator) {
  OpRegistry registry;
  ASSERT_EQ(RegisterAllOps(registry), absl::OkStatus());
  std::set<std::string> want = {"__tvm_ffi_quern_library",
                                "__tvm_ffi_quern_set_workers"};
  for (const std::string& name : registry.Names()) {
    want.insert("__tvm_ffi_" + name);
  }
  const Symbols symbols = DynamicSymbols(Read("c/libquern_tvm_ffi.so"));
  for (const std::string& name : want) {
    EXPECT_EQ(symbols.defined.count(name), 1u)
        << "c/tvm_ffi/ops.inc lacks QUERN_TVM_OP("
        << name.substr(sizeof("__tvm_ffi_") - 1) << ")";
  }
  for (const std::string& name : symbols.defined) {
    // Clang's C++20 also shows its own copies of std::string's functions.
    if (name.rfind("_ZNSt", 0) == 0) continue;
    EXPECT_EQ(want.count(name), 1u) << "no such operator: " << name;
  }
  EXPECT_EQ(symbols.needed.count("libquern.so"), 1u);
  // It needs one function of the runtime, and of Quern those of quern.h.
  EXPECT_EQ(symbols.undefined.count("TVMFFIErrorSetRaisedFromCStr"), 1u);
  for (const std::string& name : symbols.undefined) {
    EXPECT_TRUE(name.rfind("TVMFFI", 0) != 0 ||
                name == "TVMFFIErrorSetRaisedFromCStr")
        << name;
    EXPECT_TRUE(name.find("quern") == std::string::npos ||
                name.rfind("quern_", 0) == 0)
        << name;
  }
}

// One execution of either side, with tensors of its own.
struct Side {
  std::deque<std::vector<uint8_t>> bytes;
  std::vector<AnyTensorView> views;

  void Add(const TensorMeta* meta) {
    bytes.emplace_back();
    views.emplace_back();
    if (meta == nullptr) return;
    bytes.back() = Filled(*meta, static_cast<int64_t>(views.size()));
    views.back() = ViewOf(*meta, bytes.back());
  }
};

// In which of its forms the arguments of a call are given.
enum class Form { kPointers, kObjects, kSmall };

class Arguments {
 public:
  explicit Arguments(Form form) : form_(form) {}

  void Add(const AnyTensorView& view) {
    if (view.rank() == 0) return list.push_back(None());
    std::vector<int64_t>& shape = shapes_.emplace_back();
    for (int d = 0; d < view.rank(); ++d) shape.push_back(view.extent(d));
    TensorObject& made = tensors_.emplace_back();
    made.tensor =
        quern_dense(const_cast<void*>(view.data()), c_abi::ToC(view.dtype()),
                    view.rank(), shape.data());
    list.push_back(form_ == Form::kObjects
                       ? Pointer(QUERN_TVM_TENSOR, &made)
                       : Pointer(QUERN_TVM_DLTENSOR, &made.tensor));
  }
  void Add(const OpArg& arg) {
    if (const auto* i = std::get_if<int64_t>(&arg)) {
      list.push_back(Int(*i));
    } else if (const auto* x = std::get_if<double>(&arg)) {
      list.push_back(Float(*x));
    } else if (const auto* yes = std::get_if<bool>(&arg)) {
      list.push_back(Bool(*yes));
    } else if (const auto* text = std::get_if<std::string>(&arg)) {
      Add(*text);
    } else if (const auto* ref = std::get_if<OpObjectRef>(&arg)) {
      const auto& weights = *static_cast<const LinearWeights*>(ref->object);
      quern_linear_weights* adopted = nullptr;
      EXPECT_EQ(quern_linear_weights_adopt(LibraryOfFunctions(),
                                           weights.bytes().data(),
                                           weights.bytes().size(), &adopted),
                QUERN_OK);
      list.push_back(Pointer(QUERN_TVM_OPAQUE, adopted));
    } else {
      list.push_back(None());
    }
  }
  void Add(const std::string& text) {
    std::string& kept = texts_.emplace_back(text);
    if (form_ == Form::kSmall && text.size() < 8) {
      quern_tvm_value value = Pointer(QUERN_TVM_SMALL_TEXT, nullptr);
      value.small_size = static_cast<uint32_t>(text.size());
      std::memcpy(value.value.small, text.data(), text.size());
      list.push_back(value);
    } else if (form_ == Form::kPointers) {
      list.push_back(Pointer(QUERN_TVM_RAW_TEXT, kept.c_str()));
    } else {
      TextObject& made = objects_.emplace_back();
      made.bytes = {kept.data(), kept.size()};
      list.push_back(Pointer(QUERN_TVM_TEXT, &made));
    }
  }

  std::vector<quern_tvm_value> list;

 private:
  const Form form_;
  std::deque<std::vector<int64_t>> shapes_;
  std::deque<TensorObject> tensors_;
  std::deque<std::string> texts_;
  std::deque<TextObject> objects_;
};

// Whether this interface can have the object.
bool CanHave(const NamedArgs& args) {
  for (const auto& [name, arg] : args) {
    const auto* const ref = std::get_if<OpObjectRef>(&arg);
    if (ref != nullptr && std::string(ref->type) != "LinearWeights") {
      return false;
    }
  }
  return true;
}

// Whether it indexes memory by numbers that only a cache's owner knows, or has
// zero points, which the fill is not.
bool NeedsBooks(const OpSchema& schema) {
  for (const OpParam& param : schema.params) {
    if (param.name == "slot_mapping" || param.name == "req_to_token" ||
        param.name == "cu_seqlens_q" || param.name == "w_zeros") {
      return true;
    }
  }
  return false;
}

class TvmFfiOpsTest : public testing::Test {
 protected:
  TvmFfiOpsTest() { EXPECT_EQ(RegisterAllOps(registry_), absl::OkStatus()); }

  // Tensors of the example `args`, those that are returned last.
  Side TensorsOf(const std::string& name, const NamedArgs& args) const {
    const OpSchema& schema = registry_.Find(name)->schema;
    const auto arranged = ArrangeArgs(schema, args);
    const auto returns = registry_.InferShapes(name, args);
    EXPECT_EQ(arranged.status(), absl::OkStatus());
    Side side;
    for (size_t i = 0; i < schema.params.size(); ++i) {
      if (schema.params[i].type != OpType::kTensor) continue;
      side.Add(std::get_if<TensorMeta>(&(*arranged)[i]));
    }
    for (size_t i = 0; i < static_cast<size_t>(schema.returns); ++i) {
      side.Add(returns.ok() ? &(*returns)[i] : nullptr);
    }
    return side;
  }
  // What the function of the operator is called with.
  void SetArguments(const std::string& name, const NamedArgs& args,
                    const Side& side, Arguments& arguments) const {
    const OpSchema& schema = registry_.Find(name)->schema;
    const auto arranged = ArrangeArgs(schema, args);
    const size_t inputs =
        side.views.size() - static_cast<size_t>(schema.returns);
    for (size_t i = inputs; i < side.views.size(); ++i) {
      arguments.Add(side.views[i]);
    }
    size_t tensor = 0;
    for (size_t i = 0; i < schema.params.size(); ++i) {
      if (schema.params[i].type == OpType::kTensor) {
        arguments.Add(side.views[tensor++]);
      } else {
        arguments.Add((*arranged)[i]);
      }
    }
  }

  // Whether the operator was executed rather than refused.
  bool Compare(const std::string& name, const NamedArgs& args, Form form);

  OpRegistry registry_;
};

bool TvmFfiOpsTest::Compare(const std::string& name, const NamedArgs& args,
                            Form form) {
  const OpDispatcher ops(registry_, OpPolicy());
  Side cpp = TensorsOf(name, args), called = TensorsOf(name, args);
  Arguments arguments(form);
  SetArguments(name, args, called, arguments);
  const std::string refused = CallByName(name, arguments.list);
  auto made = ops.Make(name, args);
  if (!made.ok()) {
    EXPECT_EQ(refused, made.status().message());
    return false;
  }
  InlineExecutor executor;
  EXPECT_EQ(made->op->Prepare(cpp.views, executor), absl::OkStatus());
  const absl::Status checked = made->CheckArgs(cpp.views);
  EXPECT_EQ(refused, checked.message());
  if (!checked.ok() || !refused.empty()) return false;
  // No example needs more.
  auto memory = AlignedBuffer::Create(int64_t{1} << 24);
  if (!memory.ok()) return false;
  // The second execution is that of the plan that was kept, on more workers,
  // whose workspace may be larger. Operators that write to what they read do so
  // twice.
  for (const char* const time : {"first", "second"}) {
    made->op->Execute(cpp.views, Workspace(memory->data(), memory->bytes()),
                      executor);
    for (size_t i = 0; i < cpp.bytes.size(); ++i) {
      EXPECT_EQ(called.bytes[i], cpp.bytes[i])
          << "tensor " << i << " of the " << time << " call";
    }
    if (*time == 'f') {
      EXPECT_EQ(CallByName("quern_set_workers", {Int(7)}), "");
      EXPECT_EQ(CallByName(name, arguments.list), "");
      EXPECT_EQ(CallByName("quern_set_workers", {Int(1)}), "");
    }
  }
  return true;
}

TEST_F(TvmFfiOpsTest, HaveTheBitsAndTheRefusalsOfCpp) {
  std::set<std::string> ran;
  for (const std::string& name : registry_.Names()) {
    const OpDefinition& op = *registry_.Find(name);
    if (NeedsBooks(op.schema)) continue;
    for (const auto& [dtype, form] : {std::pair(DType::kF32, Form::kPointers),
                                      std::pair(DType::kBF16, Form::kObjects),
                                      std::pair(DType::kF16, Form::kSmall)}) {
      SCOPED_TRACE(name + " " + std::string(DTypeName(dtype)));
      const NamedArgs args = op.example(dtype);
      if (!CanHave(args)) continue;
      // A thread of its own begins without a workspace.
      std::thread([&, form = form] {
        if (Compare(name, args, form)) ran.insert(name);
      }).join();
    }
  }
  EXPECT_GE(ran.size(), 60u);
  EXPECT_EQ(ran.count("linear") + ran.count("rms_norm") +
                ran.count("silu_and_mul") + ran.count("rotary_embedding"),
            4u);
}

// A value of any type. What it points to lives in `kept`.
struct Kept {
  int64_t shape[8];
  TensorObject tensor;
  TextObject text;
  std::vector<uint8_t> bytes;
};
quern_tvm_value AnyValue(Rng& rng, Kept& kept) {
  constexpr int64_t kEdges[] = {-1, 0, 1, 3, 1000, INT64_MAX, INT64_MIN};
  const int64_t edge = kEdges[rng.Integer(0, 6)];
  switch (rng.Integer(0, 9)) {
    case 0:
      return None();
    case 1:
      return Int(edge);
    case 2: {
      quern_tvm_value value = Int(edge);
      value.type = QUERN_TVM_BOOL;
      return value;
    }
    case 3:
      return Float(static_cast<double>(edge));
    case 4:  // null, as any type
      return Pointer(static_cast<int32_t>(rng.Integer(-1, 80)), nullptr);
    case 5: {
      quern_tvm_value value = Int(edge);
      value.type = QUERN_TVM_SMALL_TEXT;
      value.small_size = static_cast<uint32_t>(edge);
      return value;
    }
    case 6:
      kept.text.bytes = {"silu", static_cast<uint64_t>(rng.Integer(0, 4))};
      return Pointer(QUERN_TVM_TEXT, &kept.text);
    case 7:
      return Pointer(QUERN_TVM_OPAQUE, &kept.shape);
    default:
      break;
  }
  // A tensor of up to 4096 elements of zeros, or one that is no tensor.
  constexpr int64_t kExtents[] = {0, 1, 2, 3, 4, 8};
  for (int64_t& extent : kept.shape) extent = kExtents[rng.Integer(0, 5)];
  kept.bytes.assign(size_t{8} * 8 * 8 * 8 * 8, 0);
  constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16,
                              DType::kI32, DType::kI64,  DType::kI8,
                              DType::kU8};
  quern_tensor& tensor = kept.tensor.tensor;
  tensor = quern_dense(kept.bytes.data(), c_abi::ToC(kTypes[rng.Integer(0, 6)]),
                       static_cast<int32_t>(rng.Integer(1, 4)), kept.shape);
  switch (rng.Integer(0, 7)) {
    case 0:
      tensor.ndim = static_cast<int32_t>(edge);
      break;
    case 1:
      tensor.dtype.lanes = static_cast<uint16_t>(edge);
      break;
    case 2:
      tensor.shape = nullptr;
      break;
    case 3:
      kept.shape[0] = edge < 0 ? edge : -2;
      break;
    case 4:
      tensor.device.device_type = static_cast<int32_t>(edge) == 1 ? 2 : 3;
      break;
    default:
      break;
  }
  return rng.Integer(0, 1) == 0 ? Pointer(QUERN_TVM_TENSOR, &kept.tensor)
                                : Pointer(QUERN_TVM_DLTENSOR, &tensor);
}

TEST_F(TvmFfiOpsTest, SpoiltArgumentsAreDoneOrRefused) {
  TestRng rng;
  int64_t refused = 0;
  for (const std::string& name : registry_.Names()) {
    SCOPED_TRACE(name);
    const OpDefinition& op = *registry_.Find(name);
    const NamedArgs args = op.example(DType::kF32);
    if (NeedsBooks(op.schema) || !CanHave(args)) continue;
    Side side = TensorsOf(name, args);
    Arguments good(Form::kPointers);
    SetArguments(name, args, side, good);
    for (int round = 0; round < 30; ++round) {
      for (size_t i = 0; i < side.views.size(); ++i) {
        const DType dtype = side.views[i].dtype();
        // Index 0 is one of every table that is not empty.
        if (dtype != DType::kI32 && dtype != DType::kI64) continue;
        side.bytes[i].assign(side.bytes[i].size(), 0);
      }
      std::vector<quern_tvm_value> list = good.list;
      Kept kept[2];
      list[At(rng, list.size())] = AnyValue(rng, kept[0]);
      if (rng.Integer(0, 1) == 0) {
        list[At(rng, list.size())] = AnyValue(rng, kept[1]);
      }
      if (rng.Integer(0, 7) == 0) list.resize(At(rng, list.size()));
      refused += CallByName(name, list).empty() ? 0 : 1;
    }
  }
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace quern
