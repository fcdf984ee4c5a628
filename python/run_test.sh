#!/usr/bin/env bash
# Runs one file of tests: run_test.sh NAME [MODULE...]
# NumPy is needed, or the modules that are named. $QUERN_PYTHON is the Python; the
# system's if it is not set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
python=${QUERN_PYTHON:-python3}
name=$1
shift
(($# > 0)) || set -- numpy
command -v "$python" >/dev/null ||
  { echo "FAILED: no $python; need Python 3.8 or later (apt-get install python3 python3-$1)" >&2; exit 1; }
for module in "$@"; do
  "$python" -c "import $module" ||
    { echo "FAILED: $(command -v "$python") has no $module; need it (apt-get install python3-$module)" >&2; exit 1; }
done
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec "$python" -B -X faulthandler -m unittest -v "tests.$name"
