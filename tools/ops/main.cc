// Lists the operators: by default the table of ops/README.md; with --isas each
// combination of operator, dtype, instruction set of this CPU, and provider,
// tab-separated. --help says so.

#include <cstdio>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "quern/core/dtype.h"
#include "quern/core/isa.h"
#include "quern/ops/registry/all_ops.h"
#include "quern/ops/registry/op_registry.h"

namespace quern {
namespace {

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "ops: %s\n", std::string(status.message()).c_str());
  return 1;
}

// Prints a line for each operator that can be made, with the target that it
// chose.
int ListIsas(const OpRegistry& registry) {
  std::printf("op\tdtype\tisa\tprovider\n");
  std::set<std::string> listed;
  for (const Isa& isa : SupportedIsas()) {
    UseIsaForTest(&isa);
    for (const std::string& name : registry.Names()) {
      const OpDefinition& op = *registry.Find(name);
      for (const DType dtype : kFloatDTypes) {
        const auto args = ArrangeArgs(op.schema, op.example(dtype));
        if (!args.ok()) return Fail(args.status());
        for (const OpImplementation& implementation : op.implementations) {
          const auto made = implementation.factory(*args);
          if (!made.ok()) continue;
          const std::string line =
              absl::StrCat(name, "\t", DTypeName(dtype), "\t",
                           (*made)->target(), "\t", implementation.provider);
          // Several sets may run the same kernels.
          if (listed.insert(line).second) std::printf("%s\n", line.c_str());
        }
      }
    }
  }
  UseIsaForTest(nullptr);
  return 0;
}

constexpr char kHelp[] =
    "Lists the operators that can be made by name.\n\n"
    "  ops          the table of ops/README.md: schemas, and the providers for "
    "each dtype\n"
    "  ops --isas   operator, dtype, instruction set of this CPU and provider, "
    "tab-separated\n\n"
    "Exit code: 0, or 1 if something failed, or 2 if the command line is "
    "wrong.\n";

int Main(int argc, char** argv) {
  const absl::string_view word = argc == 2 ? argv[1] : "";
  if (word == "--help" || word == "-h") {
    return std::fputs(kHelp, stdout) < 0 ? 1 : 0;
  }
  if (argc > 2 || (argc == 2 && word != "--isas")) {
    std::fprintf(stderr, "ops: \"%s\"; need --isas, --help or nothing\n",
                 argv[argc - 1]);
    return 2;
  }
  OpRegistry registry;
  const absl::Status status = RegisterAllOps(registry);
  if (!status.ok()) return Fail(status);
  if (word == "--isas") return ListIsas(registry);
  const auto table = ListOps(registry);
  if (!table.ok()) return Fail(table.status());
  std::printf("%s", table->c_str());
  return 0;
}

}  // namespace
}  // namespace quern

int main(int argc, char** argv) { return quern::Main(argc, argv); }
