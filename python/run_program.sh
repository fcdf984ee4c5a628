#!/usr/bin/env bash
# Runs a program that checks its results: run_program.sh NAME
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec python3 -B "$1.py"
