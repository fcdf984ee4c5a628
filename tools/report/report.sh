#!/usr/bin/env bash
# What `bazel run //tools/report` runs: report.py with the programs that it times.
set -euo pipefail
exec python3 tools/report/report.py --perf="$PWD/tools/perf/perf" --generate="$PWD/examples/generate/generate" \
  --make_random_gguf="$PWD/tools/make_random_gguf" --quantize_gguf="$PWD/tools/quantize_gguf" "$@"
