#!/usr/bin/env bash
# Runs the whole suite; options go to pytest. TEST_PROCESSES: how many processes share PARALLEL.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# These need processors only, and no moment: they take what the others leave, whatever time that takes.
BACKGROUND=(tests/property tests/simulation)
PARALLEL=(tests/docs tests/fuzz tests/unit)
# These fill the machine, and look at what happens when: sessions, Airflow, processes that are killed.
SERIAL=(tests/integration tests/differential tests/attack tests/fault tests/chaos tests/system)

# An option that leaves no test of a folder is fine.
run() { "$@" || (($? == 5)); }

report="$(mktemp)"
run nice -n 19 .venv/bin/python -m pytest "${BACKGROUND[@]}" --timeout=900 "$@" >"$report" 2>&1 &
background=$!
trap 'pkill -P "$background" 2>/dev/null; kill "$background" 2>/dev/null; rm -f "$report"' EXIT
trap 'exit 130' INT TERM

status=0
run .venv/bin/python -m pytest "${PARALLEL[@]}" --numprocesses="${TEST_PROCESSES:-2}" --dist=loadfile "$@" || status=1
run .venv/bin/python -m pytest "${SERIAL[@]}" "$@" || status=1
echo "Beside them, in the background: ${BACKGROUND[*]}"
wait "$background" || status=1
cat "$report"
exit "$status"
