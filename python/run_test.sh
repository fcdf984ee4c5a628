#!/usr/bin/env bash
# Runs one file of tests with the system's Python: run_test.sh NAME
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
command -v python3 >/dev/null ||
  { echo "FAILED: no python3; need Python 3.8 or later (apt-get install python3 python3-numpy)" >&2; exit 1; }
python3 -c 'import numpy' ||
  { echo "FAILED: $(command -v python3) has no NumPy; need it (apt-get install python3-numpy)" >&2; exit 1; }
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec python3 -B -X faulthandler -m unittest -v "tests.$1"
