#!/usr/bin/env bash
# Makes .venv in the project root with the pinned packages and the `mrl` command on it.
#
# Runs again only when requirements, setup.py, the Python version or the project's place change;
# an interrupted install is noticed and redone. Environment:
#   PYTHON          the Python 3.12 to use (default: the first found)
#   MRL_ENV_CACHE   a folder: keep environments there, keyed to the pins, and make .venv a link,
#                   so that several checkouts share one (CI does)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD

say() { printf '[setup] %s\n' "$*"; }
die() { printf '[setup] error: %s\n' "$@" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12; do
    # A version manager's shim may be on PATH and still refuse, so ask each to run.
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  die "Python 3.12 not found (looked for \$PYTHON, python3.12, python3 and pyenv's versions)." \
    "Install it: apt-get install python3.12 python3.12-venv python3.12-dev, or pyenv install 3.12," \
    "or set PYTHON=/path/to/python3.12."
}

check_machine() {  # python
  [[ "$(uname -s) $(uname -m)" == "Linux x86_64" ]] ||
    die "the pinned packages are for Linux x86_64, this is $(uname -s) $(uname -m)."
  "$1" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$1 has no venv module. Install it: apt-get install python3.12-venv."
  command -v cc >/dev/null ||
    die "no C compiler (cc): some packages come as source. Install it: apt-get install build-essential."
  [[ -f $("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h ]] ||
    die "$1 has no headers (Python.h). Install them: apt-get install python3.12-dev."
}

check_disk() {  # folder that will hold the environment
  local need=10 free  # 7 for the environment, 3 for the wheels while they are unpacked
  free=$(($(df -Pk "$1" | awk 'NR == 2 {print $4}') / 1048576))
  ((free >= need)) ||
    die "installing needs about $need GB of disk (7 GB stay), $1 has $free GB free." \
      "Make room, or keep it elsewhere: MRL_ENV_CACHE=/big/disk make setup."
}

# Whole, ours, of the right Python, and made in this place (its scripts name their interpreter).
# pip leaves `~name` when it is killed while it replaces a package.
is_sound() {  # venv
  "$1/bin/python" -c 'import pip, sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null &&
    grep -qF "$1/bin/python" "$1/bin/pip" &&
    ! compgen -G "$1/lib/python3.12/site-packages/~*" >/dev/null
}

repair() {  # venv
  local info
  [[ -e $1/bin ]] || return 0
  if ! is_sound "$1"; then
    say "$1 was interrupted, moved, or made by another Python: starting over"
    find "$1" -mindepth 1 -not -name .mrl-lock -delete
    return 0
  fi
  for info in "$1"/lib/python3.12/site-packages/*.dist-info; do  # pip writes RECORD last
    [[ -f $info/RECORD ]] || { say "half installed, redone: ${info##*/}"; rm -rf "$info"; }
  done
}

run_pip() {  # arguments
  if ! "$venv/bin/python" -m pip "$@" >>"$log" 2>&1; then
    tail -n 25 "$log" >&2
    die "pip failed; the whole log is $log. Running the same command again continues."
  fi
}

# pip's own output goes to the log: this tells how far it is, when that changes.
watch_log() {  # total
  local got=0 last=-1
  while sleep 5 >/dev/null 2>&1; do
    got=$(grep -cE '^(Collecting|Processing|Requirement already satisfied)' "$log" || true)
    if grep -q '^Installing collected packages' "$log"; then
      say "  unpacking (a minute or two)"
      return
    fi
    ((got == last)) || say "  fetching $got of $1 packages"
    last=$got
  done
}

python=$(find_python)
version=$("$python" -c 'import platform; print(platform.python_version())')
pins=$(cat requirements/*.txt | cat - <(echo "$version") | sha256sum | cut -c1-16)
key=$(cat requirements/*.txt setup.py | cat - <(echo "$version $root") | sha256sum | cut -c1-64)

if [[ -n ${MRL_ENV_CACHE:-} ]] && [[ ! -e .venv || -L .venv ]]; then
  mkdir -p "$MRL_ENV_CACHE/env-$pins"
  touch "$MRL_ENV_CACHE/env-$pins"  # the time of its last use
  ln -sfn "$MRL_ENV_CACHE/env-$pins" .venv
fi
[[ -e .venv ]] || rm -f .venv  # a link whose target is gone
mkdir -p .venv
venv=$(readlink -f .venv)
log=$venv/install.log

exec 9>"$venv/.mrl-lock"
flock -n 9 || { say "waiting for another setup of $venv"; flock 9; }
[[ ! -f $venv/.mrl-$key || ! -x $venv/bin/mrl ]] || exit 0

say "1/4 Python $version: $python"
check_machine "$python"
rm -f "$venv"/.mrl-????????????????*
repair "$venv"
: >"$log"
say "2/4 virtual environment: $venv"
[[ -d $venv/lib/python3.12/site-packages/torch ]] || check_disk "$venv"
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"

# The pins are the whole truth: a machine's own constraints or --user habit must not bend them.
export PIP_CONSTRAINT=/dev/null PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
total=$(cat requirements/cpu.txt requirements/dev.txt | grep -c ==)
say "3/4 $total pinned packages (7 GB, about 5 minutes the first time), log: $log"
run_pip install --quiet -c requirements/cpu.txt setuptools
watch_log "$total" 9>&- &
watcher=$!
trap 'kill "$watcher" 2>/dev/null || true' EXIT
run_pip install --no-deps --no-build-isolation --progress-bar off \
  -r requirements/cpu.txt -r requirements/dev.txt
kill "$watcher" 2>/dev/null || true

say "4/4 mrl itself"
run_pip install --no-deps --no-build-isolation --editable .
touch "$venv/.mrl-$key"
say "ready: $root/.venv/bin/mrl"
