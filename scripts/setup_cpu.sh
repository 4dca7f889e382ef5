#!/usr/bin/env bash
# Makes .venv: SGLang and what it imports to serve on a CPU, the test tools, this package (editable).
# Does nothing when .venv is already what the requirements say. PYTHON names the interpreter to build it with.
set -euo pipefail
cd "$(dirname "$0")/.."

SGLANG=0.5.23
TORCH=2.13.0
venv=.venv
stamp=$venv/.setup-stamp

# The path is part of it: a moved checkout needs its editable install redone.
wanted=$(cat requirements/cpu.txt pyproject.toml sglang_deepep_v2_overlay.pth scripts/setup_cpu.sh <(pwd) | sha256sum)
[ "$(cat $stamp 2>/dev/null)" != "$wanted" ] || exit 0

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

if ! new_enough $venv/bin/python; then
  for python in ${PYTHON:-python3.11 python3 python}; do
    if new_enough "$python"; then break; fi
    python=
  done
  if [ -z "$python" ]; then
    echo "setup: no Python 3.11 or newer found (looked for ${PYTHON:-python3.11, python3, python}); set PYTHON=..." >&2
    exit 1
  fi
  "$python" -m venv --clear $venv || {
    echo "setup: $python cannot make a virtual environment; on Debian and Ubuntu install python3-venv" >&2
    exit 1
  }
fi

# One set-up at a time; whoever waited finds it done.
exec 9>$venv/.setup-lock
flock 9
[ "$(cat $stamp 2>/dev/null)" != "$wanted" ] || exit 0

pip() { $venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }
echo "setup: making $venv (once, a few minutes)"
echo "setup: torch $TORCH" && pip "torch==$TORCH"
echo "setup: requirements/cpu.txt" && pip -r requirements/cpu.txt
echo "setup: sglang $SGLANG" && pip --no-deps "sglang==$SGLANG"
echo "setup: this package" && pip --no-deps --no-build-isolation -e .
echo "$wanted" >$stamp
