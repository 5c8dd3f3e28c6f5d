#!/usr/bin/env bash
# Writes requirements/lock.txt from what is installed in .venv now.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

{
    echo "# What the project is developed and tested with. Written by 'make lock'; installed by 'make setup'."
    .venv/bin/python -m pip freeze --exclude-editable | grep '==' | grep -v -e '^airflow-provider-ckpt==' -e '^ckpt-runtime=='
} >requirements/lock.txt.new
mv requirements/lock.txt.new requirements/lock.txt
