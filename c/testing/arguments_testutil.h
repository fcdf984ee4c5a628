#ifndef QUERN_C_TESTING_ARGUMENTS_TESTUTIL_H_
#define QUERN_C_TESTING_ARGUMENTS_TESTUTIL_H_

// Test utility: arguments of the C interface from those of C++.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "quern/c/quern.h"
#include "quern/c/testing/c_testutil.h"
#include "quern/ops/registry/op_arg.h"

namespace quern {

// Owns the names, texts and tensors that the list points to.
class ArgumentsInC {
 public:
  // The object of the C interface that stands for one of C++; null if there is
  // none.
  using ObjectOf = std::function<void*(const OpObjectRef&)>;

  // Whether all of the arguments can be had.
  bool Add(const NamedArgs& args, const ObjectOf& object_of) {
    for (const auto& [name, arg] : args) {
      texts_.push_back(std::make_unique<std::string>(name));
      const char* const n = texts_.back()->c_str();
      if (const auto* meta = std::get_if<TensorMeta>(&arg)) {
        tensors_.push_back(
            std::make_unique<TensorInC>(meta->dtype, nullptr, meta->extents));
        list.push_back(quern_tensor_argument(n, tensors_.back()->get()));
      } else if (const auto* i = std::get_if<int64_t>(&arg)) {
        list.push_back(quern_int_argument(n, *i));
      } else if (const auto* x = std::get_if<double>(&arg)) {
        list.push_back(quern_float_argument(n, *x));
      } else if (const auto* yes = std::get_if<bool>(&arg)) {
        list.push_back(quern_bool_argument(n, *yes ? 1 : 0));
      } else if (const auto* text = std::get_if<std::string>(&arg)) {
        texts_.push_back(std::make_unique<std::string>(*text));
        list.push_back(quern_text_argument(n, texts_.back()->c_str()));
      } else if (const auto* ref = std::get_if<OpObjectRef>(&arg)) {
        void* const object = object_of(*ref);
        if (object == nullptr) return false;
        list.push_back(quern_object_argument(n, object));
      }
    }
    return true;
  }

  std::vector<quern_argument> list;

 private:
  std::vector<std::unique_ptr<std::string>> texts_;
  std::vector<std::unique_ptr<TensorInC>> tensors_;
};

}  // namespace quern

#endif  // QUERN_C_TESTING_ARGUMENTS_TESTUTIL_H_
