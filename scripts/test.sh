#!/usr/bin/env bash
# Runs the whole suite; options go to pytest. TEST_PROCESSES: how many groups run beside one another.
set -uo pipefail
set -m # each group is a process group, which an interrupt reaches as it would a pytest in the foreground
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Hundreds of processes import the same modules: they are compiled once.
unset PYTHONDONTWRITEBYTECODE

# A pytest for each: what its tests share - a session, a Spark, an Airflow - ends with it. Most of them wait for most of
# their time, and two fill two processors. The longest come first, so that the last ones end together.
GROUPS_OF_TESTS=(
    tests/fault
    tests/integration
    tests/system
    tests/unit
    tests/attack
    tests/differential
    tests/chaos
    "tests/docs tests/fuzz"
)
# These need processors only, and no moment: they take what the others leave, whatever time that takes.
BACKGROUND="tests/property tests/simulation"

reports="$(mktemp -d)"
trap 'rm -rf "$reports"' EXIT
trap 'for group in $(jobs -p); do kill -INT -- "-$group" 2>/dev/null; done; wait; exit 130' INT TERM

run() { # <nice> <folders> <options of pytest>
    local report code=0
    report="$reports/${2//[ \/]/_}"
    # shellcheck disable=SC2086  # several folders
    nice -n "$1" .venv/bin/python -m pytest $2 "${@:3}" </dev/null >"$report" 2>&1 || code=$?
    ((code == 0 || code == 5)) || touch "$reports/failed" # an option that leaves no test of a group is fine
    printf '\n=== %s\n' "$2" && cat "$report"
}

run 19 "$BACKGROUND" --timeout=900 "$@" &
for group in "${GROUPS_OF_TESTS[@]}"; do
    while (($(jobs -rp | wc -l) > ${TEST_PROCESSES:-2})); do wait -n; done
    run 0 "$group" "$@" &
done
wait
test ! -e "$reports/failed"
