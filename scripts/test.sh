#!/usr/bin/env bash
# Runs the whole suite; options go to pytest. TEST_PROCESSES: how many groups run beside one another.
set -uo pipefail
set -m # each group is a process group, which an interrupt reaches as it would a pytest in the foreground
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Hundreds of processes import the same modules: they are compiled once.
unset PYTHONDONTWRITEBYTECODE

# Rooms whose unit tests compute: they wait for no other process, and no request of theirs times out.
ROOMS=(api checkpoint configuration connectors graph operators scheduler state)

# A pytest for each: what its tests share - a session, a Spark, an Airflow - ends with it. Most of them wait for much of
# their time, and four fill two processors. The longest come first, so that the last ones end together.
GROUPS_OF_TESTS=(
    tests/integration
    tests/fault
    "tests/unit ${ROOMS[*]/#/--ignore=tests/unit/runtime/}"
    tests/system
    tests/differential
    tests/attack
    "tests/docs tests/fuzz"
    tests/chaos
)
# These need processors only, and no moment: they take what the others leave, whatever time that takes, and are what is
# left in the end: then both processors have enough to do. Each needs about a hundred seconds of one. The first one needs
# kernels in its second half only.
FILLERS=(
    "tests/simulation --ignore=tests/simulation/jobs ${ROOMS[*]/#/tests/unit/runtime/}"
    tests/simulation/jobs
    tests/property
)

# Each group's directories of tests stay until the group's next run. Pytest keeps those of its last three runs otherwise,
# and would delete those of a group that has failed while the others go on.
directories="${TMPDIR:-/tmp}/ckpt-$(id -un)-$(pwd | cksum | cut -c1-6)"
mkdir -p -m 700 "$directories"

reports="$(mktemp -d)"
trap 'rm -rf "$reports"' EXIT
trap 'for group in $(jobs -p); do kill -INT -- "-$group" 2>/dev/null; done; wait; exit 130' INT TERM

run() { # <nice> <group> <options of pytest>
    local name report code=0
    name="${2%% *}"
    name="${name#tests/}"
    name="${name//\//_}"
    report="$reports/$name"
    [[ "$2" == *tests/fuzz* ]] || set -- "$@" -p no:schemathesis # nearly a second of imports, for its tests alone
    # shellcheck disable=SC2086  # several words
    nice -n "$1" .venv/bin/python -m pytest $2 --basetemp="$directories/$name" "${@:3}" </dev/null >"$report" 2>&1 || code=$?
    ((code == 0 || code == 5)) || touch "$reports/failed" # an option that leaves no test of a group is fine
    printf '\n=== %s\n' "$2" && cat "$report"
}

fillers=" "
fill() { # <group> <options of pytest>
    run 19 "$1" --timeout=900 "${@:2}" &
    fillers+="$! "
}

# On a machine without compiled kernels the first workers of all groups would each compile all of them, for longer than
# tests wait for a job to run.
PYTHONPATH=runtime .venv/bin/python -c 'from ckpt_runtime.state.kernels import warm_up; warm_up()' &
kernels=$!
fill "${FILLERS[0]}" "$@"
wait "$kernels" || { kill -INT -- "-${fillers// /}"; exit 1; }
for group in "${FILLERS[@]:1}"; do fill "$group" "$@"; done

groups_under_way() { # says so in $under_way
    local pid
    under_way=0
    for pid in $(jobs -rp); do [[ "$fillers" == *" $pid "* ]] || ((++under_way)); done
}

for group in "${GROUPS_OF_TESTS[@]}"; do
    while groups_under_way && ((under_way >= ${TEST_PROCESSES:-4})); do wait -n; done
    run 0 "$group" "$@" &
done
wait
test ! -e "$reports/failed"
