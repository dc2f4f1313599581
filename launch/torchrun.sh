#!/usr/bin/env bash
# Trains on one or more nodes under torchrun. Run the same line on every node:
#
#   launch/torchrun.sh CONFIG [key=value ...]
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 launch/torchrun.sh configs/grpo/x.yaml actor.optim.lr=2e-6
#
# Environment: NNODES (1), NODE_RANK (0), MASTER_ADDR, MASTER_PORT (29500), NPROC_PER_NODE (GPUs),
# PYTHON (.venv/bin/python where there is one). trainer.nnodes and trainer.n_gpus_per_node follow.
set -euo pipefail
if (($# == 0)); then
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/env.sh"

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=$here/../.venv/bin/python
  [[ -x $PYTHON ]] || PYTHON=python3
fi
NNODES=${NNODES:-1}
if ((NNODES > 1)); then
  : "${MASTER_ADDR:?set MASTER_ADDR to the host name of node 0}" "${NODE_RANK:?set NODE_RANK}"
  meet=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
else
  meet=(--standalone) # picks a free port itself
fi
config=$1
shift

# Ours come first: a key given twice takes its last value, so yours win.
exec "$PYTHON" -m torch.distributed.run \
  --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE" --max-restarts 0 "${meet[@]}" \
  -m mrl.cli train "$config" \
  "trainer.nnodes=$NNODES" "trainer.n_gpus_per_node=$NPROC_PER_NODE" "$@"
