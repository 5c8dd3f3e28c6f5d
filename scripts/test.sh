#!/usr/bin/env bash
# Runs the whole suite; options are passed to pytest. TEST_PROCESSES sets the number of groups that run at the same time;
# without it four of them do, and three more while the processors have time left.
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
COMPUTING=(checkpoint configuration connectors graph operators scheduler)
ROOMS=("${COMPUTING[@]}" state)

# What the tests of a group share (a session, a Spark application, an Airflow) ends with the group. Those that wait for
# other processes most of their time come first; those that mostly compute fill the gaps behind them. Tests that import
# Airflow in their own process share one group, because the import takes as long as many of them.
GROUPS_OF_TESTS=(
    tests/differential
    tests/system
    tests/fault
    "tests/integration/test_[l-z]*.py"
    "tests/integration/test_[b-k]*.py tests/integration/test_a[!i]*.py"
    "tests/attack tests/chaos"
    "tests/docs tests/fuzz tests/integration/test_airflow_*.py"
    "tests/unit --ignore=tests/unit/provider ${ROOMS[*]/#/--ignore=tests/unit/runtime/}"
    tests/unit/provider
)
# These only compute, and none of them depends on how long something takes. They run with a low priority beside the groups
# above; with the lowest one they would stand still beside other programs. The first one needs no compiled kernels for
# most of its time.
FILLERS=(
    "tests/simulation --ignore=tests/simulation/jobs ${COMPUTING[*]/#/tests/unit/runtime/}"
    "tests/simulation/jobs tests/property tests/unit/runtime/state"
)

# A group's temporary directories stay until its next run. By default pytest keeps those of its last three runs only: it
# would delete those of a group that has failed while others still run.
directories="${TMPDIR:-/tmp}/ckpt-$(id -un)-$(pwd | cksum | cut -c1-6)"
mkdir -p -m 700 "$directories"

reports="$(mktemp -d)"
mkdir "$reports/analyses"
# One Spark answers what all groups ask while they plan programs, see tests/support/analyses.py. It starts with the first
# question.
export CKPT_TEST_ANALYSES="$reports/analyses"
.venv/bin/python -m tests.support.analyses "$reports/analyses" >"$reports/spark" 2>&1 &
analyses=$!
trap 'kill -- "-$analyses" 2>/dev/null; wait "$analyses"; rm -rf "$reports"' EXIT
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
PYTHONPATH=runtime .venv/bin/python -c 'import ckpt_runtime.connectors.numbers; from ckpt_runtime.state.kernels import warm_up; warm_up()' &
kernels=$!
.venv/bin/python -m tests.support.java_archive >"$reports/archive" 2>&1 &
archive=$!
fill "${FILLERS[0]}" "$@"
wait "$kernels" || { kill -INT -- "-${fillers// /}"; exit 1; }
wait "$archive" || { echo "There is no archive of Spark's classes, and its Java machines take longer to start:"; cat "$reports/archive"; } >&2
fill "${FILLERS[1]}" "$@"

groups_under_way() { # sets $under_way
    local pid
    under_way=0
    for pid in $(jobs -rp); do [[ "$fillers$analyses " == *" $pid "* ]] || ((++under_way)); done
}

# Whether a quarter of the processors' time in the last three seconds was idle, or went to the fillers and others of a low
# priority. Columns: cpu user nice system idle iowait irq softirq steal.
processors_have_time() {
    { grep '^cpu ' /proc/stat; sleep 3; grep '^cpu ' /proc/stat; } |
        awk '{ spare = $3 + $5 + $6 - spare; for (at = 2; at <= 9; at++) all += NR == 1 ? -$at : $at } END { exit 4 * spare < all }'
}

may_start() { # whether one more group may start now; takes a moment
    groups_under_way
    if [[ -n "${TEST_PROCESSES:-}" ]]; then
        ((under_way < TEST_PROCESSES)) || { sleep 1 && false; }
    else
        ((under_way < 4)) || { processors_have_time && ((under_way < 7)); }
    fi
}

for group in "${GROUPS_OF_TESTS[@]}"; do
    until may_start; do :; done
    run 0 "$group" "$@" &
    groups+=("$!")
done
wait "${groups[@]}" $fillers
kill "$analyses" && wait "$analyses"
printf '\nProcessor seconds of each group:\n'
grep -Hs ' s of this group$' "$reports"/* | awk '{ sub(".*/", ""); sub(":", ""); printf "%8.0f  %s\n", $2, $1; all += $2 } END { printf "%8.0f  in all\n", all }' | sort -rn
grep -hs "^Spark's Java machines" "$reports"/* | awk '{ number += $NF } END { print "\nSpark'"'"'s Java machines that were started in all groups: " number + 0 }'
test ! -e "$reports/failed"
