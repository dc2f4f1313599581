#!/usr/bin/env bash
# Makes the environment of a peer of mrl, beside mrl's own, which is never written to:
#   benchmarks/peers/install.sh NAME [--target DIR] [--base PYTHON] [--wheels DIR]
#   benchmarks/peers/install.sh NAME --pack DIR [--base PYTHON]
#
#   NAME          trl | verl: what it needs is listed in NAME.txt beside this file
#   --target DIR  where (default ~/.cache/mrl-peers/NAME); the Python is DIR/bin/python
#   --base PY     the Python whose packages (torch, transformers, vLLM, ...) lie below the peer's
#                 own, by a .pth file (default: the project's .venv, else python3)
#   --wheels DIR  no network: install the wheels that `--pack DIR` fetched elsewhere
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)

die() { printf 'install.sh: %s\n' "$@" >&2; exit 2; }

name=${1:-}
[[ -n $name && -f $here/$name.txt ]] ||
  die "give a peer: $(cd "$here" && echo *.txt | sed 's/\.txt//g')"
shift
target=$HOME/.cache/mrl-peers/$name wheels='' pack='' base=''
while (($#)); do
  [[ $# -ge 2 ]] || die "$1 needs a value"
  case $1 in
    --target) target=$2 ;;
    --base) base=$2 ;;
    --wheels) wheels=$2 ;;
    --pack) pack=$2 ;;
    *) die "unknown option $1" ;;
  esac
  shift 2
done
[[ -n $base ]] || base=$root/.venv/bin/python
[[ -x $base ]] || base=$(command -v python3) || die "no python3; give --base PYTHON"

export PIP_CONSTRAINT=/dev/null PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
if [[ -n $pack ]]; then
  "$base" -m pip wheel --quiet --no-deps --wheel-dir "$pack" -r "$here/$name.txt"
  echo "packed: $(du -sh "$pack" | cut -f1) in $pack"
  exit 0
fi

[[ -x $target/bin/python ]] || "$base" -m venv "$target"
peer=$target/bin/python
own=$("$peer" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$base" - >"$own/base.pth" <<'PYTHON'
import sys
from pathlib import Path

print("\n".join(path for path in sys.path if path and any(Path(path).glob("*.dist-info"))))
PYTHON
# Without dependencies: the list is whole, and the base's packages stay as they are.
"$peer" -m pip install --quiet --no-deps ${wheels:+--no-index -f "$wheels"} \
  -r "$here/$name.txt"
"$peer" -c "import $name, torch, transformers; print('$name', $name.__version__, \
'torch', torch.__version__, 'transformers', transformers.__version__)"
echo "ready: $peer"
