// Writes a GGUF file whose matrices are in a block format of
// quant/block_format.h, from one whose matrices are F32, F16 or BF16. --help
// explains the arguments.

#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "quern/core/status_macros.h"
#include "quern/models/gguf/gguf.h"
#include "quern/quant/block_format.h"
#include "quern/quant/block_quantize.h"
#include "quern/tools/gguf_writer.h"

namespace quern {
namespace {

constexpr char kOp[] = "quantize_gguf";

struct Options {
  std::string in, out;
  const BlockFormatInfo* matrices = nullptr;
  const BlockFormatInfo* embedding = nullptr;  // and the output matrix
};

// What the tensors of a file become.
struct Plan {
  std::vector<const BlockFormatInfo*> formats;  // null: as it is
  int64_t elements = 0, bytes = 0;              // of tensors in blocks
  int64_t tensors = 0;
};

std::string FormatNames() {
  return absl::StrJoin(BlockFormats(), ", ",
                       [](std::string* out, const BlockFormatInfo& info) {
                         absl::StrAppend(out, info.name);
                       });
}

absl::StatusOr<const BlockFormatInfo*> FormatNamed(absl::string_view name) {
  for (const BlockFormatInfo& info : BlockFormats()) {
    if (absl::EqualsIgnoreCase(info.name, name)) return &info;
  }
  return InvalidArgument(kOp, "format=", name, "; need one of ", FormatNames());
}

// The format that a tensor gets; null for one that stays as it is: vectors,
// norms, routers, whose rounding could change a choice of experts,
// convolutions, and matrices whose rows are not whole blocks.
const BlockFormatInfo* FormatOf(const GgufTensor& tensor,
                                const Options& options) {
  const bool floats = tensor.type == GgufTensorType::kF32 ||
                      tensor.type == GgufTensorType::kF16 ||
                      tensor.type == GgufTensorType::kBF16;
  if (!floats || tensor.rows() == 1 || absl::EndsWith(tensor.name, ".bias") ||
      absl::EndsWith(tensor.name, "_norm.weight") ||
      absl::StrContains(tensor.name, "ffn_gate_inp") ||
      absl::StrContains(tensor.name, "conv")) {
    return nullptr;
  }
  const bool embedding =
      tensor.name == "token_embd.weight" || tensor.name == "output.weight";
  const BlockFormatInfo* format =
      embedding ? options.embedding : options.matrices;
  return tensor.cols() % format->values == 0 ? format : nullptr;
}

absl::StatusOr<Plan> Announce(const GgufFile& file, const Options& options,
                              GgufFileWriter& writer) {
  for (const absl::string_view key : file.Keys()) {
    // These three describe the file that is read.
    if (key == "general.file_type" || key == "general.alignment" ||
        key == "general.quantization_version") {
      continue;
    }
    QUERN_ASSIGN_OR_RETURN(const absl::string_view bytes, file.KeyBytes(key));
    writer.KeyBytes(bytes);
  }
  writer.KeyU32("general.quantization_version", 2);
  Plan plan;
  for (const GgufTensor& tensor : file.tensors()) {
    const BlockFormatInfo* format = FormatOf(tensor, options);
    plan.formats.push_back(format);
    QUERN_RETURN_IF_ERROR(writer.AddTensor(
        tensor.name, tensor.dims,
        format == nullptr ? tensor.type
                          : static_cast<GgufTensorType>(format->format)));
    if (format == nullptr) continue;
    ++plan.tensors;
    plan.elements += tensor.elements;
    plan.bytes += tensor.elements / format->values * format->bytes;
  }
  if (plan.tensors > 0) return plan;
  return InvalidArgument(
      kOp, options.in, " has no matrix of F32, F16 or BF16 whose rows are ",
      "whole blocks of ", options.matrices->values, " values");
}

// Writes a tensor row by row.
absl::Status Write(const GgufFile& file, const GgufTensor& tensor,
                   const BlockFormatInfo* format, GgufFileWriter& writer) {
  const int64_t row_bytes =
      format == nullptr ? tensor.row_bytes()
                        : tensor.cols() / format->values * format->bytes;
  std::vector<uint8_t> bytes(static_cast<size_t>(row_bytes));
  std::vector<float> row(static_cast<size_t>(tensor.cols()));
  for (int64_t r = 0; r < tensor.rows(); ++r) {
    if (format == nullptr) {
      QUERN_RETURN_IF_ERROR(file.ReadPartBytes(tensor, {r, 1, 0, tensor.cols()},
                                               absl::MakeSpan(bytes)));
    } else {
      QUERN_RETURN_IF_ERROR(file.ReadRows(tensor, r, absl::MakeSpan(row)));
      const absl::Status quantized =
          QuantizeBlocks(format->format, row, absl::MakeSpan(bytes));
      if (!quantized.ok()) {
        return InvalidArgument(kOp, "tensor '", tensor.name, "' row ", r, ": ",
                               quantized.message());
      }
    }
    QUERN_RETURN_IF_ERROR(writer.Append(bytes));
  }
  return absl::OkStatus();
}

bool SameFile(const std::string& a, const std::string& b) {
  struct stat of_a {
  }, of_b{};
  return stat(a.c_str(), &of_a) == 0 && stat(b.c_str(), &of_b) == 0 &&
         of_a.st_dev == of_b.st_dev && of_a.st_ino == of_b.st_ino;
}

absl::Status Quantize(const Options& options) {
  QUERN_ASSIGN_OR_RETURN(const GgufFile file, GgufFile::Open(options.in));
  if (SameFile(options.in, options.out)) {
    return InvalidArgument(kOp, "the file to write is the one to read, ",
                           options.in, "; need another");
  }
  GgufFileWriter writer;
  QUERN_ASSIGN_OR_RETURN(const Plan plan, Announce(file, options, writer));
  QUERN_RETURN_IF_ERROR(writer.Open(options.out));
  for (size_t i = 0; i < plan.formats.size(); ++i) {
    QUERN_RETURN_IF_ERROR(
        Write(file, file.tensors()[i], plan.formats[i], writer));
  }
  QUERN_RETURN_IF_ERROR(writer.Finish());
  absl::PrintF("%d of %d tensors are in blocks, %.4f bits a weight; %d bytes\n",
               plan.tensors, plan.formats.size(),
               8.0 * static_cast<double>(plan.bytes) /
                   static_cast<double>(plan.elements),
               writer.file_bytes());
  return absl::OkStatus();
}

std::string HelpText() {
  return absl::StrCat(
      "Writes a GGUF file whose matrices are in a block format.\n\n"
      "  quantize_gguf IN OUT FORMAT [EMBEDDING_FORMAT]\n\n"
      "IN has matrices of F32, F16 or BF16. A file OUT is replaced. Routers,\n"
      "convolutions, norms, vectors and matrices whose rows are not whole\n"
      "blocks stay as they are. EMBEDDING_FORMAT is that of the embedding and "
      "of the "
      "output\n"
      "matrix; FORMAT if it is not given. Codes are the nearest, and scales\n"
      "cover the largest values; programs that search for better scales write\n"
      "files that are nearer to their source.\n\n"
      "Formats: ",
      FormatNames(),
      "\n\nExit code: 0, or 1 if something failed, or 2 if the command line is "
      "wrong.\n");
}

absl::StatusOr<Options> ParseOptions(int argc, char** argv) {
  if (argc != 4 && argc != 5) {
    return InvalidArgument(kOp, argc - 1,
                           " arguments; need IN OUT FORMAT "
                           "[EMBEDDING_FORMAT]; --help explains them");
  }
  // `bazel run` changes the working directory.
  const char* directory = std::getenv("BUILD_WORKING_DIRECTORY");
  const auto from_caller = [directory](const std::string& path) {
    if (directory == nullptr || path.empty() || path[0] == '/') return path;
    return absl::StrCat(directory, "/", path);
  };
  Options options;
  options.in = from_caller(argv[1]);
  options.out = from_caller(argv[2]);
  QUERN_ASSIGN_OR_RETURN(options.matrices, FormatNamed(argv[3]));
  QUERN_ASSIGN_OR_RETURN(options.embedding, FormatNamed(argv[argc - 1]));
  return options;
}

int Main(int argc, char** argv) {
  const auto complain = [](const absl::Status& status, int code) {
    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
    return code;
  };
  if (argc == 2 && absl::string_view(argv[1]) == "--help") {
    std::fputs(HelpText().c_str(), stdout);
    return std::fflush(stdout) == 0 ? 0 : 1;
  }
  const absl::StatusOr<Options> options = ParseOptions(argc, argv);
  if (!options.ok()) return complain(options.status(), 2);
  const absl::Status status = Quantize(*options);
  return status.ok() ? 0 : complain(status, 1);
}

}  // namespace
}  // namespace quern

int main(int argc, char** argv) { return quern::Main(argc, argv); }
