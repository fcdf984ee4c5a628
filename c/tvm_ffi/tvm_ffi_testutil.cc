#include "quern/c/tvm_ffi/tvm_ffi_testutil.h"

#include <dlfcn.h>

#include "gtest/gtest.h"

// The runtime's function, which the library finds because the program shows it.
extern "C" __attribute__((visibility("default"))) void
TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message) {
  quern::LastRaised() = {kind, message};
}

namespace quern {

Raised& LastRaised() {
  thread_local Raised raised;
  return raised;
}

quern_tvm_function FindFunction(const std::string& op) {
  void* const symbol = dlsym(RTLD_DEFAULT, ("__tvm_ffi_" + op).c_str());
  EXPECT_NE(symbol, nullptr) << op;
  return reinterpret_cast<quern_tvm_function>(symbol);
}

std::string CallByName(const std::string& op,
                       const std::vector<quern_tvm_value>& args,
                       quern_tvm_value* result) {
  Raised& raised = LastRaised();
  raised = {};
  const quern_tvm_function function = FindFunction(op);
  if (function == nullptr) return "no such function";
  quern_tvm_value ignored = Int(7);
  quern_tvm_value* const at = result == nullptr ? &ignored : result;
  const int code =
      function(nullptr, args.data(), static_cast<int32_t>(args.size()), at);
  EXPECT_EQ(code, raised.kind.empty() ? 0 : -1);
  EXPECT_EQ(raised.kind.empty(), raised.message.empty());
  if (code == 0 && result == nullptr) {
    EXPECT_EQ(at->type, QUERN_TVM_NONE);
  }
  return raised.message;
}

quern_library* LibraryOfFunctions() {
  quern_tvm_value result = {};
  EXPECT_EQ(CallByName("quern_library", {}, &result), "");
  EXPECT_EQ(result.type, QUERN_TVM_OPAQUE);
  return static_cast<quern_library*>(result.value.pointer);
}

}  // namespace quern
