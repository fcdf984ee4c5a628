// libquern.so has no oneDNN. gemm/linear.cc asks for it by a weak reference,
// which the loader would otherwise resolve to another copy of Quern in the
// program that loads this one.

namespace quern {

struct LinearImplementation;
const LinearImplementation* LinkedOneDnn();
const LinearImplementation* LinkedOneDnn() { return nullptr; }

}  // namespace quern
