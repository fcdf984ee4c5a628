// ThreadSanitizer asks the program for what it shall not report.

namespace {

// oneDNN's cache of primitives hands what one thread built to another through a
// std::shared_future. oneDNN is not instrumented (.bazelrc says why), so the
// sanitizer sees the memory, through memcmp, but not the hand-over.
constexpr char kSuppressions[] = "race:^dnnl_primitive_attr::operator==\n";

}  // namespace

// The names are the sanitizer's.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() { return kSuppressions; }
