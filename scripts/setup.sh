#!/usr/bin/env bash
# Makes .venv as requirements/lock.txt says, and installs the project into it. Does nothing when it is up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LOCK=requirements/lock.txt
VENV=.venv
export PIP_DISABLE_PIP_VERSION_CHECK=1

scripts/check_java.sh
python="$(scripts/find_python.sh)"
key="$("$python" - setup.py runtime/setup.py "$LOCK" scripts/setup.sh <<'PYTHON'
import hashlib, pathlib, sys

digest = hashlib.sha256(repr(sys.version_info[:2]).encode())
for name in sys.argv[1:]:
    digest.update(pathlib.Path(name).read_bytes())
print(digest.hexdigest()[:16])
PYTHON
)"
stamp="$VENV/.setup-$key"
if [[ -e "$stamp" ]]; then
    echo "$VENV is up to date."
    exit 0
fi

if ! "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    "$python" -m venv --clear "$VENV" || {
        echo "Cannot make a virtual environment; on Debian and Ubuntu: sudo apt-get install --yes python3-venv" >&2
        exit 1
    }
fi
rm -f "$VENV"/.setup-*

# pyspark-client, which Airflow's Spark provider requires, puts other versions of the same files where pyspark's are:
# pyspark has to come last and to overwrite them.
pyspark="$(grep '^pyspark==' "$LOCK")"
if command -v uv >/dev/null; then
    # Files are copied: links would let pyspark overwrite the files of pyspark-client in uv's cache as well.
    install() { uv pip install --quiet --link-mode copy --python "$VENV/bin/python" "$@"; }
    again=--reinstall
else
    install() { "$VENV/bin/python" -m pip install --quiet "$@"; }
    again=--force-reinstall
fi
grep -v '^pyspark==' "$LOCK" | install --requirement /dev/stdin
install "$again" --no-deps "$pyspark"
install --no-deps --editable runtime --editable .
"$VENV/bin/python" -m pip check
"$VENV/bin/python" -c 'from ckpt_runtime.spark.installation import check_pyspark; print("PySpark", check_pyspark())'
touch "$stamp"
echo "$VENV is ready."
