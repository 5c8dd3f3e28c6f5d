#!/usr/bin/env bash
# Checks what changed against a branch (BASE, by default main's merge base): style, types, and the unit tests of each
# changed room. Takes less than two minutes with warm caches; `make test` remains what a change has to pass.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

base="${BASE:-$(git merge-base HEAD origin/main 2>/dev/null || git merge-base HEAD main)}"
mapfile -t changed < <({ git diff --name-only --diff-filter=d "$base"; git ls-files --others --exclude-standard; } | sort -u)

.venv/bin/ruff check .
.venv/bin/ruff format --check .
PYTHONPATH="$PWD/runtime:$PWD" .venv/bin/mypy

declare -A tests=()
for file in "${changed[@]}"; do
    case "$file" in
        runtime/ckpt_runtime/*/*) folder="${file#runtime/ckpt_runtime/}"; folder="tests/unit/runtime/${folder%%/*}" ;;
        runtime/ckpt_runtime/*.py) folder="tests/unit/runtime/test_$(basename "$file")" ;;
        airflow_provider_ckpt/*) folder=tests/unit/provider ;;
        tests/unit/*/test_*.py | tests/property/test_*.py) folder="$file" ;;
        *) continue ;;
    esac
    [[ ! -e "$folder" ]] || tests["$folder"]=1
done
if ((${#tests[@]} == 0)); then
    echo "No unit test belongs to what changed."
    exit 0
fi
exec .venv/bin/python -m pytest -q -m "not slow and not spark and not long" -p no:schemathesis "${!tests[@]}"
