// Continues a text with a Llama-architecture model whose parts are held by
// processes on one machine or many:
//
//   mpirun -n 4 generate_mpi --prompt="In the beginning"
//
// Each process opens the file that --model names on its machine. Rank 0 leads
// (generator.h). A process that dies by a signal is noticed by mpirun, which
// ends the others. docs/scaling.md says when ranks pay.

#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "examples/generate/generator.h"
#include "examples/generate/options.h"
#include "quern/core/machine/cpu_info.h"
#include "quern/core/threads/hwy_executor.h"
#include "quern/ops/parallel/mpi/mpi_communicator.h"

namespace quern {
namespace {

constexpr char kProgram[] = "generate_mpi";

// Number of cores for this process: those it may run on, divided by the number
// of processes of this machine that may run on them too. Launchers that bind
// processes give each its own cores; others let all processes run on all cores.
int ShareOfCores() {
  MPI_Comm machine;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL,
                      &machine);
  int processes = 1;
  MPI_Comm_size(machine, &processes);
  cpu_set_t own;
  CPU_ZERO(&own);
  sched_getaffinity(0, sizeof(own), &own);
  std::vector<cpu_set_t> all(static_cast<size_t>(processes));
  MPI_Allgather(&own, sizeof(own), MPI_BYTE, all.data(), sizeof(own), MPI_BYTE,
                machine);
  MPI_Comm_free(&machine);
  const auto sharers = static_cast<int>(std::count_if(
      all.begin(), all.end(),
      [&](const cpu_set_t& other) { return CPU_EQUAL(&own, &other) != 0; }));
  return std::clamp(AvailableCores() / std::max(sharers, 1), 1,
                    HwyExecutor::kMaxWorkers);
}

int Main(int argc, char** argv) {
  int ranks = 1, rank = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const auto communicator = MpiCommunicator::Create(MPI_COMM_WORLD);
  // If creating the communicator failed on a rank, the ranks agree by MPI
  // itself.
  int here = communicator.ok() ? 1 : 0, everywhere = 0;
  MPI_Allreduce(&here, &everywhere, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (everywhere == 0) {
    if (rank == 0) {
      std::fprintf(stderr, "%s: %s\n", kProgram,
                   here == 1
                       ? "another rank has no memory to communicate by"
                       : std::string(communicator.status().message()).c_str());
    }
    return 1;
  }
  absl::StatusOr<GenerateOptions> options = ParseOptions(argc, argv);
  if (options.ok()) {
    if (absl::Status capped = CapIsa(*options); !capped.ok()) options = capped;
  }
  // The launcher of another MPI starts each process as the only one.
  if (options.ok() && options->ranks.value_or(ranks) != ranks) {
    options = absl::InvalidArgumentError(
        absl::StrCat("--ranks=", *options->ranks, ", but ", ranks,
                     " of them are running; start generate_mpi by the mpirun "
                     "of the MPI that it was built with"));
  }
  const int share = ShareOfCores();
  if (options.ok() && options->threads == 0) options->threads = share;
  return GenerateMain(kProgram, options, communicator->get());
}

}  // namespace
}  // namespace quern

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  const int code = quern::Main(argc, argv);
  MPI_Finalize();
  return code;
}
