#!/usr/bin/env bash
# Runs the whole suite; options are passed to pytest. TEST_PROCESSES is the number of groups that run at the same time.
#
# Each group is a pytest process of its own. pytest-xdist does not replace that: its workers run files of several folders
# in one process, where a session that one folder shares stays alive while unit tests of another one look at the process's
# children, threads and temporary directory. Four tests of worker templates fail in such a process.
set -uo pipefail
set -m # each group is a process group, so that an interrupt reaches all of its processes
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Hundreds of processes import the same modules, which are compiled only once.
unset PYTHONDONTWRITEBYTECODE

# Rooms whose unit tests only compute: they wait for no other process, and none of their requests can time out.
ROOMS=(checkpoint configuration connectors graph operators scheduler state)

# What the tests of a group share (a session, a Spark application, an Airflow) ends with the group. Most groups wait for
# much of their time, so four of them keep two processors busy. The longest come first.
GROUPS_OF_TESTS=(
    "tests/differential/test_[p-z]*.py"
    "tests/unit --ignore=tests/unit/provider ${ROOMS[*]/#/--ignore=tests/unit/runtime/}"
    "tests/differential/test_[a-o]*.py"
    "tests/integration/test_[m-z]*.py"
    "tests/integration/test_[a-l]*.py"
    tests/fault
    tests/system
    tests/unit/provider
    tests/attack
    "tests/docs tests/fuzz"
    tests/chaos
)
# These only compute, and none of them depends on how long something takes. They run with a low priority beside the groups
# above; with the lowest one they would stand still beside other programs. Each needs about a hundred seconds of a
# processor. The first one needs compiled kernels in its second half only.
FILLERS=(
    "tests/simulation --ignore=tests/simulation/jobs ${ROOMS[*]/#/tests/unit/runtime/}"
    tests/simulation/jobs
    tests/property
)

# A group's temporary directories stay until its next run. By default pytest keeps those of its last three runs only: it
# would delete those of a group that has failed while others still run.
directories="${TMPDIR:-/tmp}/ckpt-$(id -un)-$(pwd | cksum | cut -c1-6)"
mkdir -p -m 700 "$directories"

reports="$(mktemp -d)"
mkdir "$reports/analyses"
export CKPT_TEST_ANALYSES="$reports/analyses" # what Spark answered while programs were planned, see tests/support/analyses.py
trap 'rm -rf "$reports"' EXIT
trap 'for group in $(jobs -p); do kill -INT -- "-$group" 2>/dev/null; done; wait; exit 130' INT TERM

run() { # <nice> <group> <options of pytest>
    local name report code=0
    name="${2%% *}"
    name="${name#tests/}"
    name="${name//\//_}"
    name="${name//[^a-z_-]/}"
    report="$reports/$name"
    [[ "$2" == *tests/fuzz* ]] || set -- "$@" -p no:schemathesis # its import takes nearly a second, and only these tests need it
    # shellcheck disable=SC2086  # several words
    nice -n "$1" .venv/bin/python -m pytest $2 --basetemp="$directories/$name" "${@:3}" </dev/null >"$report" 2>&1 || code=$?
    ((code == 0 || code == 5)) || touch "$reports/failed" # 5: the options select no test of this group
    printf '\n=== %s\n' "$2" && cat "$report"
}

fillers=" "
fill() { # <group> <options of pytest>
    run 10 "$1" --timeout=900 "${@:2}" &
    fillers+="$! "
}

# Without compiled kernels the first workers of all groups would each compile all of them, which takes longer than tests
# wait for a job to run.
PYTHONPATH=runtime .venv/bin/python -c 'from ckpt_runtime.state.kernels import warm_up; warm_up()' &
kernels=$!
.venv/bin/python -m tests.support.java_archive >"$reports/archive" 2>&1 &
archive=$!
fill "${FILLERS[0]}" "$@"
wait "$kernels" || { kill -INT -- "-${fillers// /}"; exit 1; }
wait "$archive" || { echo "There is no archive of Spark's classes, and its Java machines take longer to start:"; cat "$reports/archive"; } >&2
for group in "${FILLERS[@]:1}"; do fill "$group" "$@"; done

groups_under_way() { # sets $under_way
    local pid
    under_way=0
    for pid in $(jobs -rp); do [[ "$fillers" == *" $pid "* ]] || ((++under_way)); done
}

for group in "${GROUPS_OF_TESTS[@]}"; do
    while groups_under_way && ((under_way >= ${TEST_PROCESSES:-4})); do wait -n; done
    run 0 "$group" "$@" &
done
wait
grep -hs "^Spark's Java machines" "$reports"/* | awk '{ number += $NF } END { print "\nSpark'"'"'s Java machines that were started in all groups: " number + 0 }'
test ! -e "$reports/failed"
