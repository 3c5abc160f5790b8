#!/bin/sh
# Prints the first Python that `make setup` can use: of its arguments, or of these names, the newest first.
# A name on PATH may be a shim that fails. Where none will do, says why of the first one that runs.
check=$(dirname "$0")/check.py
reason=
for python in ${@:-python3.13 python3.12 python3.11 python3}; do
    if answer=$("$python" "$check" python 2>/dev/null); then
        echo "$python"
        exit
    fi
    reason=${reason:-$answer}
done
echo "${reason:-No Python runs here as ${*:-python3.13, python3.12, python3.11 or python3}: install one of them.}" >&2
exit 1
