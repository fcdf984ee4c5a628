#!/usr/bin/env bash
# Runs a program that checks its results: run_program.sh NAME [ARGUMENT...]. As a
# module, because Python follows the link to a script, which leads away from the
# library.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec "${QUERN_PYTHON:-python3}" -B -m "$1" "${@:2}"
