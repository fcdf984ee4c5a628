// What the functions of libquern_tvm_ffi.so refuse, with which kind and words,
// and what they keep for each thread.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "quern/c/quern.h"
#include "quern/c/tensor.h"
#include "quern/c/tvm_ffi/tvm_ffi.h"
#include "quern/c/tvm_ffi/tvm_ffi_testutil.h"
#include "quern/core/dtype.h"
#include "quern/ops/registry/all_ops.h"
#include "quern/ops/registry/op_registry.h"
#include "quern/ops/registry/op_schema.h"
#include "quern/testing/no_alloc.h"

namespace quern {
namespace {

class TvmFfiRefusalTest : public testing::Test {
 protected:
  TvmFfiRefusalTest() { Reset(); }
  void Reset() {
    for (float& o : out_) o = -7;
    out_tensor_ = quern_dense(out_, c_abi::ToC(DType::kF32), 2, shape_);
    x_tensor_ = quern_dense(x_, c_abi::ToC(DType::kF32), 2, shape_);
    weight_tensor_ =
        quern_dense(weight_, c_abi::ToC(DType::kF32), 1, shape_ + 1);
    args_ = {Pointer(QUERN_TVM_DLTENSOR, &out_tensor_),
             Pointer(QUERN_TVM_DLTENSOR, &x_tensor_),
             Pointer(QUERN_TVM_DLTENSOR, &weight_tensor_), Float(1e-5)};
  }
  void ExpectRefused(const std::string& kind, const std::string& words) {
    const std::string message = CallByName("rms_norm", args_);
    EXPECT_EQ(LastRaised().kind, kind) << message;
    EXPECT_NE(message.find(words), std::string::npos) << message;
    for (const float o : out_) EXPECT_EQ(o, -7);
    Reset();
    EXPECT_EQ(CallByName("rms_norm", args_), "");
    EXPECT_NE(out_[0], -7);
    Reset();
  }

  int64_t shape_[2] = {2, 4};
  float x_[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  float weight_[4] = {1, 1, 1, 1};
  float out_[8];
  quern_tensor out_tensor_, x_tensor_, weight_tensor_;
  std::vector<quern_tvm_value> args_;
};

TEST_F(TvmFfiRefusalTest, SaysWhatIsWrong) {
  args_.resize(1);
  ExpectRefused("TypeError", "rms_norm: 1 arguments; need 2 to 6: (out, x, ");
  args_.resize(9, None());
  ExpectRefused("TypeError", "rms_norm: 9 arguments; need 2 to 6: (out, x, ");
  args_[1] = Float(1);
  ExpectRefused("TypeError", "rms_norm: x has tvm-ffi's type 3; need a tensor");
  args_[1] = Pointer(QUERN_TVM_DLTENSOR, nullptr);
  ExpectRefused("ValueError", "rms_norm: x is null");
  args_[1] = None();
  ExpectRefused("ValueError", "rms_norm: x");
  args_[0] = None();
  ExpectRefused("ValueError", "rms_norm: out");
  args_[3] = Pointer(QUERN_TVM_RAW_TEXT, "a little");
  ExpectRefused("ValueError", "rms_norm: eps");
  args_[3] = Pointer(QUERN_TVM_RAW_TEXT, nullptr);
  ExpectRefused("ValueError", "rms_norm: eps is null");
  TextObject text = {};
  text.bytes = {nullptr, 3};
  args_[3] = Pointer(QUERN_TVM_TEXT, &text);
  ExpectRefused("ValueError", "rms_norm: eps is null");
  text.bytes = {"1e-5", 5};
  args_[3] = Pointer(QUERN_TVM_TEXT, &text);
  ExpectRefused("ValueError", "rms_norm: eps is a string with a zero byte");
  text.bytes.size = UINT64_MAX;
  args_[3] = Pointer(QUERN_TVM_TEXT, &text);
  ExpectRefused("ValueError", "rms_norm: eps is a string of more than 4096");
  args_[3] = Pointer(QUERN_TVM_SMALL_TEXT, nullptr);
  args_[3].small_size = UINT32_MAX;
  ExpectRefused("ValueError", "rms_norm: eps is a string with a zero byte");
  args_[3] = Pointer(72, x_);  // a map
  ExpectRefused("TypeError",
                "rms_norm: eps has tvm-ffi's type 72; need an int");
  args_[3] = Pointer(QUERN_TVM_OPAQUE, &x_tensor_);
  ExpectRefused("ValueError", "rms_norm: eps is no object");
  x_tensor_.device.device_type = 2;
  ExpectRefused("ValueError", "rms_norm: x has device_type=2; need 1");
  out_tensor_.device.device_type = 2;
  ExpectRefused("ValueError", "rms_norm: out has device_type=2; need 1");
  x_tensor_.dtype = quern_dtype_of(QUERN_CODE_FLOAT, 64);
  ExpectRefused("NotImplementedError",
                "rms_norm: x has DLPack type code 2, 64");
  out_tensor_.dtype = c_abi::ToC(DType::kBF16);
  ExpectRefused("ValueError", "rms_norm: out");
  x_tensor_.ndim = 9;
  ExpectRefused("ValueError", "rms_norm: x has ndim=9");
  x_tensor_.shape = nullptr;
  ExpectRefused("ValueError", "rms_norm: x has a null shape");
  x_tensor_.data = nullptr;
  ExpectRefused("ValueError", "rms_norm: x");
}

TEST_F(TvmFfiRefusalTest, TakesNoNullArguments) {
  quern_tvm_value result = {};
  EXPECT_EQ(FindFunction("rms_norm")(nullptr, nullptr, 2, &result), -1);
  EXPECT_EQ(LastRaised().message, "rms_norm: the arguments are null");
  EXPECT_EQ(FindFunction("rms_norm")(nullptr, args_.data(), -1, &result), -1);
  EXPECT_EQ(FindFunction("rms_norm")(nullptr, args_.data(), 4, nullptr), 0);
}

// Operators that take weights as an object go on with the weights of each call.
TEST_F(TvmFfiRefusalTest, RefusesObjectsThatWereDestroyed) {
  float codes[16] = {};
  for (int i = 0; i < 4; ++i) codes[5 * i] = 2;
  int64_t square[2] = {4, 4};
  const quern_tensor codes_tensor =
      quern_dense(codes, c_abi::ToC(DType::kF32), 2, square);
  quern_linear_weights_options options = {};
  options.size = sizeof(options);
  options.n = options.k = 4;
  options.format = "f32";
  quern_linear_source source = {};
  source.codes = &codes_tensor;
  quern_linear_weights* weights = nullptr;
  ASSERT_EQ(quern_linear_weights_pack(LibraryOfFunctions(), &options, &source,
                                      1, sizeof(source), nullptr, &weights),
            QUERN_OK);
  OpRegistry registry;
  ASSERT_EQ(RegisterAllOps(registry), absl::OkStatus());
  std::vector<quern_tvm_value> in_order = {args_[0]};
  for (const OpParam& param : registry.Find("linear")->schema.params) {
    in_order.push_back(param.name == "x" ? args_[1]
                       : param.name == "weights"
                           ? Pointer(QUERN_TVM_OPAQUE, weights)
                           : None());
  }
  EXPECT_EQ(CallByName("linear", in_order), "");
  for (int i = 0; i < 8; ++i) EXPECT_EQ(out_[i], 2 * x_[i]);
  EXPECT_EQ(quern_destroy(weights), QUERN_OK);
  EXPECT_NE(CallByName("linear", in_order).find("was destroyed"),
            std::string::npos);
  EXPECT_EQ(LastRaised().kind, "RuntimeError");
}

TEST_F(TvmFfiRefusalTest, WorkersGiveTheSameBits) {
  EXPECT_EQ(CallByName("rms_norm", args_), "");
  const std::vector<float> want(out_, out_ + 8);
  EXPECT_EQ(CallByName("quern_set_workers", {Int(2)}), "");
  Reset();
  EXPECT_EQ(CallByName("rms_norm", args_), "");
  EXPECT_EQ(std::vector<float>(out_, out_ + 8), want);
  EXPECT_NE(CallByName("quern_set_workers", {Int(0)}), "");
  EXPECT_EQ(LastRaised().kind, "ValueError");
  EXPECT_NE(CallByName("quern_set_workers", {}), "");
  EXPECT_EQ(CallByName("quern_set_workers", {Int(1)}), "");
}

// Allocations of a call of rms_norm that is done.
int64_t AllocationsOf(const std::vector<quern_tvm_value>& args) {
  const quern_tvm_function rms_norm = FindFunction("rms_norm");
  const auto count = static_cast<int32_t>(args.size());
  quern_tvm_value result;
  NoAllocScope scope;
  const int code = rms_norm(nullptr, args.data(), count, &result);
  const int64_t allocations = scope.count();
  scope.Forgive();
  EXPECT_EQ(code, 0);
  return allocations;
}

TEST_F(TvmFfiRefusalTest, KeepsTheLast32Plans) {
  EXPECT_EQ(CallByName("rms_norm", args_), "");
  EXPECT_EQ(AllocationsOf(args_), 0);
  std::vector<quern_tvm_value> others = args_;
  for (int i = 1; i <= 31; ++i) {
    others[3] = Float(i);
    EXPECT_EQ(CallByName("rms_norm", others), "");
  }
  EXPECT_EQ(AllocationsOf(args_), 0);
  for (int i = 1; i <= 32; ++i) {
    others[3] = Float(100 + i);
    EXPECT_EQ(CallByName("rms_norm", others), "");
  }
  EXPECT_GT(AllocationsOf(args_), 0);
  EXPECT_EQ(AllocationsOf(args_), 0);
  // Another epsilon is another plan.
  const float small = out_[0];
  EXPECT_EQ(CallByName("rms_norm", others), "");
  EXPECT_LT(out_[0], small / 2);
}

// The operator packs its weight, so a kept one would multiply the old weight.
TEST_F(TvmFfiRefusalTest, ReadsTheWeightsOfEachCall) {
  float weight[16] = {};
  int64_t square[2] = {4, 4};
  const quern_tensor weight_tensor =
      quern_dense(weight, c_abi::ToC(DType::kF32), 2, square);
  const std::vector<quern_tvm_value> args = {
      args_[0], args_[1], Pointer(QUERN_TVM_DLTENSOR, &weight_tensor)};
  for (const float scale : {2.0f, 3.0f}) {
    for (int i = 0; i < 4; ++i) weight[5 * i] = scale;
    EXPECT_EQ(CallByName("replicated_linear", args), "");
    for (int i = 0; i < 8; ++i) EXPECT_EQ(out_[i], scale * x_[i]);
  }
}

// More kinds of calls than a thread keeps, on threads that end.
TEST_F(TvmFfiRefusalTest, ThreadsKeepPlansOfTheirOwn) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int64_t i = 0; i < 200; ++i) {
        const int64_t rows = 1 + (i * 7 + t) % 50;
        std::vector<float> x(static_cast<size_t>(rows) * 4, 2.0f), out(x);
        int64_t shape[] = {rows, 4};
        quern_tensor x_tensor =
            quern_dense(x.data(), c_abi::ToC(DType::kF32), 2, shape);
        quern_tensor out_tensor =
            quern_dense(out.data(), c_abi::ToC(DType::kF32), 2, shape);
        EXPECT_EQ(CallByName("relu2", {Pointer(QUERN_TVM_DLTENSOR, &out_tensor),
                                       Pointer(QUERN_TVM_DLTENSOR, &x_tensor)}),
                  "");
        EXPECT_EQ(out, std::vector<float>(out.size(), 4.0f));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Threads make operators in one library, which keeps one sentence.
TEST_F(TvmFfiRefusalTest, ThreadsGetSentencesOfTheirOwn) {
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      int64_t wrong[] = {2, -1 - t};
      quern_tensor x = x_tensor_;
      x.shape = wrong;
      std::vector<quern_tvm_value> args = args_;
      args[1] = Pointer(QUERN_TVM_DLTENSOR, &x);
      const std::string words = "x has shape[1]=" + std::to_string(-1 - t);
      for (int i = 0; i < 300; ++i) {
        const std::string message = CallByName("rms_norm", args);
        EXPECT_NE(message.find(words), std::string::npos) << message;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A call that meets a change of the pool is done or refused.
TEST_F(TvmFfiRefusalTest, WorkersMayChangeBetweenCallsOfOthers) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([this] {
      float out[8];
      quern_tensor out_tensor = out_tensor_;
      out_tensor.data = out;
      std::vector<quern_tvm_value> args = args_;
      args[0] = Pointer(QUERN_TVM_DLTENSOR, &out_tensor);
      for (int i = 0; i < 300; ++i) {
        const std::string refused = CallByName("rms_norm", args);
        EXPECT_TRUE(refused.empty() ||
                    refused.find("destroyed") != refused.npos)
            << refused;
      }
    });
  }
  for (int i = 0; i < 30; ++i) {
    EXPECT_EQ(CallByName("quern_set_workers", {Int(1 + i % 3)}), "");
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(CallByName("quern_set_workers", {Int(1)}), "");
}

}  // namespace
}  // namespace quern
