#!/usr/bin/env bash
# Proves that every Execute checks its arguments in debug builds. Each noexcept
# function that is named Execute... or takes an Executor must call
# QUERN_DCHECK_OK(...) itself, or stand in one of the two lists below, which say
# who checks instead. A call of another Execute proves nothing: that one may
# check other arguments, or none. The check must be one that can refuse: a layer
# of gemm/ that does not override LinearLayer::CheckArgs has none.
#
# Usage: tools/check_execute.sh [FILE...]     default: the library's sources
#
# Reads sources as clang-format leaves them: a body ends with a brace at the
# indent of its function's first line.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Private functions that trust their arguments, because every caller has checked
# them. gemm: LinearPlan::Execute and GroupedLinearPlan::Execute are the only
# callers of a layer, and gemm/linear_refusal_test.cc and
# gemm/grouped_linear_refusal_test.cc prove that these two check.
readonly checked_by_callers="
  gemm/onednn/packed_matmul_execute.cc:PackedMatmul::Execute
  gemm/layers/packed_layer_of.h:Execute
  ops/parallel/parallel_lm_head.cc:ParallelLmHeadPlan::OwnLogits
  ops/registry/op_bound_plan.h:Run
  ops/registry/vllm/scaled_mm_ops.cc:ExecuteWide
"

# Functions that hand all of their tensors to operators, each of which checks
# what it is given. models/: the tensors are scratch that the decoder lays out,
# and the matrices and operators are BoundOps.
readonly checked_by_callees="
  models/decoder/parts/attention_mixer.cc:AttentionMixer::Execute
  models/decoder/parts/decoder_operators.h:AddNorm
  models/decoder/parts/decoder_operators.h:Copy
  models/decoder/parts/decoder_operators.h:Embed
  models/decoder/parts/decoder_operators.h:Finish
  models/decoder/parts/decoder_operators.h:Gate
  models/decoder/parts/decoder_operators.h:Gather
  models/decoder/parts/decoder_operators.h:HeadNorms
  models/decoder/parts/decoder_operators.h:Norm
  models/decoder/parts/decoder_operators.h:PostNorm
  models/decoder/parts/decoder_operators.h:Rotate
  models/decoder/parts/dense_feed_forward.cc:DenseFeedForward::Execute
  models/decoder/memory/latent_attention.cc:LatentAttention::Execute
  models/decoder/parts/latent_mixer.cc:LatentMixer::Execute
  models/decoder/loading/matrix.h:Execute
  models/decoder/parts/mixture_feed_forward.cc:MixtureFeedForward::Execute
  models/decoder/memory/page_pool.cc:PagePool::Attend
  models/decoder/memory/page_pool.cc:PagePool::CopyShared
  models/decoder/memory/page_pool.cc:PagePool::Write
  models/decoder/memory/page_pool.h:AttendLatents
  models/decoder/parts/recurrent_mixer.cc:RecurrentMixer::Execute
  ops/registry/op_registry.h:Execute
"

# Prints "FILE:FUNCTION line LINE" for each function without a check, then "N
# functions".
scan() {
  awk '
    FNR == 1 { signature = ""; in_body = 0 }
    in_body {
      if (index($0, indent "}") == 1) {
        in_body = 0
        if (body !~ /QUERN_DCHECK_OK\(/) print FILENAME ":" name " line " line
        signature = ""
      } else if ($0 !~ /^ *\/\//) {
        body = body $0
      }
      next
    }
    /^[ ]*\/\// || /^[ ]*$/ || /^#/ { signature = ""; next }
    {
      if (signature == "") { line = FNR; match($0, /^ */); indent = substr($0, 1, RLENGTH) }
      signature = signature " " $0
    }
    /noexcept( override)?( final)? \{$/ {
      if (match(signature, /[A-Za-z0-9_:]+\(/)) {
        name = substr(signature, RSTART, RLENGTH - 1)
        if (name ~ /(^|::)Execute[A-Za-z0-9]*$/ || signature ~ /Executor&/) {
          ++functions; in_body = 1; body = ""
          next
        }
      }
    }
    /[;{}:]$/ { signature = "" }
    END { print functions + 0 " functions" }
  ' "$@"
}

# The scan must find the planted functions without a check, and no others.
self_test() {
  local found
  found=$(scan <(printf '%s\n' \
    'void Bad::Execute(const A& a,' \
    '                  Executor& executor) const noexcept {' \
    '  Run(a);' '}' '' \
    'void Bad::Pack(const A& a, Executor& e) noexcept {' '  Run(a);' \
    '  // QUERN_DCHECK_OK(CheckArgs(a));' '}' '' \
    'void Good::Execute(const A& a, Executor& e) const noexcept {' \
    '  QUERN_DCHECK_OK(CheckArgs(a));' '  Run(a);' '}' '' \
    'void Delegates::Execute(const A& a, Executor& e) const noexcept {' \
    '  layer_->Execute(a, e);' '}' '' \
    '  void ExecuteAll(const A& a) const noexcept override {' \
    '    plan_.ExecuteAll(a);' '  }') | sed 's/^[^ ]*[0-9]:\(.*\) line .*/\1/' | paste -sd' ')
  [[ $found == "Bad::Execute Bad::Pack Delegates::Execute ExecuteAll 5 functions" ]] ||
    { echo "check_execute: the scan is broken, it found: $found" >&2; exit 1; }
}

self_test
files=("$@")
if ((${#files[@]} == 0)); then
  mapfile -t files < <(git ls-files attention c cache core gemm models ops packing quant |
    grep -E '\.(cc|h)$' | grep -vE '_(test|bench|testutil)\.(cc|h)$|/testing/')
fi
found=$(scan "${files[@]}")
count=${found##*$'\n'}
listed=$(tr -s ' \n' '\n' <<<"$checked_by_callers $checked_by_callees" | grep . | sort)
unchecked=$(grep -v ' functions$' <<<"$found" | cut -d' ' -f1 | sort -u || true)
missing=$(comm -23 <(printf '%s\n' "$unchecked" | grep . || true) <(printf '%s\n' "$listed"))
if [[ -n $missing ]]; then
  grep -wF "$missing" <<<"$found" >&2
  echo "need QUERN_DCHECK_OK(CheckArgs(...)) in each of these, or an entry that says who checks" >&2
  exit 1
fi
if (($# == 0)); then
  stale=$(comm -13 <(printf '%s\n' "$unchecked") <(printf '%s\n' "$listed"))
  [[ -z $stale ]] ||
    { printf '%s\n' "$stale" >&2; echo "these are listed, but check or do not exist" >&2; exit 1; }
  ((${count%% *} >= 97)) ||
    { echo "check_execute: $count found; need 97 or more" >&2; exit 1; }
fi
listed_count=$(wc -l <<<"$listed")
echo "execute: of $count all check their arguments in debug builds, but for $listed_count whose callers or callees do"
