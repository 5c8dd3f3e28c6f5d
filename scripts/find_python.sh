#!/usr/bin/env bash
# Prints a Python of 3.11 or later: $PYTHON if it is set, else the first that is found.
set -euo pipefail

is_recent() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

if [[ -n "${PYTHON:-}" ]]; then
    is_recent "$PYTHON" || {
        echo "PYTHON=$PYTHON is not Python 3.11 or later." >&2
        exit 1
    }
    echo "$PYTHON"
    exit 0
fi
for candidate in python3 python3.11 python3.12 python3.13; do
    if is_recent "$candidate"; then
        echo "$candidate"
        exit 0
    fi
done
cat >&2 <<'MESSAGE'
No Python 3.11 or later found.
  Debian, Ubuntu:  sudo apt-get install --yes python3 python3-venv
  macOS:           brew install python@3.11
Or name one: make setup PYTHON=/path/to/python3.11
MESSAGE
exit 1
