# Sourced by the other scripts. Owns the environment .venv: finds a Python, makes the environment once from exact
# constraints, and prints the wall time of every phase. Nothing here is specific to one script.
#
# Settings: WAVEPP_PYTHON (interpreter to build .venv with), WAVEPP_TORCH_INDEX (package index for torch alone).

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
PY="$ROOT/.venv/bin/python"
EXTRAS="torch,dev,demo"
CONSTRAINTS="constraints/linux-cpu.txt"
export PIP_DISABLE_PIP_VERSION_CHECK=1

CURRENT_PHASE=""

# phase NAME COMMAND...: run the command, then print how long it took; a failing command ends the script.
# `phase ... || failed=1` goes on instead; use it with programs only, since bash then ignores `set -e` inside functions.
phase() {
  local name="$1" start="${EPOCHREALTIME/./}"
  shift
  CURRENT_PHASE="$name"
  printf '== %s\n' "$name"
  "$@"
  local rc=$? ms=$(((${EPOCHREALTIME/./} - start) / 1000)) note=""
  if [[ $rc -ne 0 ]]; then note=" FAILED (exit $rc)"; fi
  printf -- '-- %s: %d.%03d s%s\n' "$name" $((ms / 1000)) $((ms % 1000)) "$note"
  CURRENT_PHASE=""
  return "$rc"
}

report_failed_phase() {
  local rc=$?
  if [[ $rc -ne 0 && -n "$CURRENT_PHASE" ]]; then
    printf -- '-- %s: FAILED (exit %d)\n' "$CURRENT_PHASE" "$rc" >&2
  fi
}
trap report_failed_phase EXIT

# Print the first interpreter that is new enough, or name the package that brings one.
find_python() {
  local candidate
  for candidate in ${WAVEPP_PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return 0
    fi
  done
  echo "WavePP needs Python 3.11 or newer; install it, for example: apt-get install python3 python3-venv python3-pip" >&2
  return 2
}

# make_venv FOLDER: create it unless it runs already.
make_venv() {
  local folder="$1" python
  if "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    return 0
  fi
  python="$(find_python)"
  if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    echo "$python lacks the modules venv and ensurepip; install them: apt-get install python3-venv" >&2
    exit 2
  fi
  "$python" -m venv --clear "$folder"
  if ! "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "$python made an environment without pip; install it: apt-get install python3-pip" >&2
    exit 2
  fi
}

# environment_key FILE...: changes whenever an environment made from these files, in this place, must be renewed.
environment_key() {
  { echo "$ROOT"; cat "$@"; } | sha256sum | cut -d' ' -f1
}

install_main() {
  make_venv .venv
  if [[ -n "${WAVEPP_TORCH_INDEX:-}" ]]; then
    "$PY" -m pip install --quiet --no-deps --constraint "$CONSTRAINTS" --index-url "$WAVEPP_TORCH_INDEX" torch
  fi
  # With build isolation: etcd3 comes as source only and builds with tools that a fresh environment lacks.
  "$PY" -m pip install --quiet --constraint "$CONSTRAINTS" --editable ".[$EXTRAS]"
}

# stamped FOLDER KEY INSTALL...: run the install command unless the folder carries the key of an earlier success.
stamped() {
  local stamp="$1/.wavepp-stamp" key="$2"
  shift 2
  if [[ -x "${stamp%/*}/bin/python" && "$(cat "$stamp" 2>/dev/null)" == "$key" ]]; then
    echo "up to date"
    return 0
  fi
  rm -f "$stamp"
  "$@"
  echo "$key" >"$stamp"
}

ensure_env() {
  phase "environment" stamped .venv "$(environment_key pyproject.toml "$CONSTRAINTS" proto/wavepp_proto/__init__.py)" install_main
}
