#ifndef MODEL_H_
#define MODEL_H_

#include "quern/core/executor.h"

// Whether the model of the file `path` runs this repository's rms_norm where
// the policy enables it, Quern's where it does not, and computes nearly the
// same logits by both.
bool ModelRunsOps(const char* path, quern::Executor& executor);

#endif  // MODEL_H_
