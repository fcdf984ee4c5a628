#ifndef QUERN_EXAMPLES_GENERATE_GENERATOR_H_
#define QUERN_EXAMPLES_GENERATE_GENERATOR_H_

// The program from weights on disk to generated text, on one rank or several.
//
// With a communicator every rank calls the same function. Each rank opens the
// file by itself, holds its part of the model and computes with threads of its
// own. One rank leads: it reads the prompt, samples, and prints text, progress
// and statistics. The other ranks print nothing and need no tokenizer.
//
// The leader's word holds where ranks could differ: the prompt's tokens, the
// options weights, activations, kv, max_tokens, samples, perplexity and stats,
// and each new token.
// All ranks have the same logits and could sample for themselves, but machines
// of different instruction sets may round a probability differently, and then
// the ranks would continue different texts. So the leader broadcasts each token
// in eight bytes a sample, which also tell the ranks when to stop: only the
// leader knows that its output has failed.
//
// Ranks agree on a status wherever one of them may fail alone: the command
// line, the file, the model, the state, the output. If any fails, all of them
// return the same status and none waits for another. Files that differ from the
// leader's are refused. A forward pass communicates within, so it must fail on
// all ranks or on none. A rank that a signal kills is its launcher's matter:
// mpirun ends the others.

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "examples/generate/options.h"
#include "quern/core/communicator.h"

namespace quern {

// Prints options.prompt, or standard input, and what follows it. `communicator`
// may be null, for one rank; options.threads are those of this rank, and
// the communicator's size stands for options.ranks.
absl::Status Generate(const GenerateOptions& options,
                      Communicator* communicator, int leader = 0);

// What main does with a parsed command line, on each rank: prints the help,
// generates, or says in one sentence, after "`program`: ", why not. Returns the
// exit code, which is the same on every rank: 0, or 1 if something failed, or 2
// if a command line is wrong, or 130 after SIGINT while the model was loaded.
int GenerateMain(const char* program,
                 const absl::StatusOr<GenerateOptions>& options,
                 Communicator* communicator, int leader = 0);

}  // namespace quern

#endif  // QUERN_EXAMPLES_GENERATE_GENERATOR_H_
