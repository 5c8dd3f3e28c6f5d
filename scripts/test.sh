#!/usr/bin/env bash
# Runs the whole suite; options go to pytest. TEST_PROCESSES: how many processes share the tests that may share a machine.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# These need processors and no moment: they take what the others leave, with the patience of the last in the queue.
PATIENT=(tests/property tests/simulation)
SHARING=(tests/docs tests/fuzz tests/unit)
# These fill the machine, and look at what happens when: sessions, Airflow, processes that are killed.
ALONE=(tests/integration tests/fault tests/system)

# An option that leaves no test of a folder is fine.
run() { "$@" || (($? == 5)); }

report="$(mktemp)"
run nice -n 19 .venv/bin/python -m pytest "${PATIENT[@]}" --timeout=900 "$@" >"$report" 2>&1 &
patient=$!
trap 'pkill -P "$patient" 2>/dev/null; kill "$patient" 2>/dev/null; rm -f "$report"' EXIT
trap 'exit 130' INT TERM

status=0
run .venv/bin/python -m pytest "${SHARING[@]}" --numprocesses="${TEST_PROCESSES:-2}" --dist=loadfile "$@" || status=1
run .venv/bin/python -m pytest "${ALONE[@]}" "$@" || status=1
echo "Meanwhile, in the background: ${PATIENT[*]}"
wait "$patient" || status=1
cat "$report"
exit "$status"
