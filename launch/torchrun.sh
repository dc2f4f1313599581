#!/usr/bin/env bash
# Trains on one or more nodes under torchrun. Run the same line on every node:
#
#   launch/torchrun.sh CONFIG [key=value ...]
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 launch/torchrun.sh configs/grpo/x.yaml actor.optim.lr=2e-6
#
# Environment: NNODES (1), NODE_RANK (0), MASTER_ADDR, MASTER_PORT (29500), NPROC_PER_NODE (GPUs),
# PYTHON (.venv/bin/python where there is one), MAX_RESTARTS (0: after a failed rank, from the last
# checkpoint), MRL_AUTHKEY (64 hexadecimal digits, the same on all nodes: ranks prove with it that
# they belong to the job; unset on several nodes, it is drawn, and told on their network).
# trainer.nnodes, trainer.n_gpus_per_node and trainer.max_restarts follow.
# SIGUSR1 to all of its processes ends the run after the step in hand, with a checkpoint.
set -euo pipefail
trap '' USR1 # Slurm sends it to every process of a step: all ignore it but the controller
if (($# == 0)); then
  sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
# shellcheck source=launch/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

NNODES=${NNODES:-1}
if ((NNODES > 1)); then
  : "${MASTER_ADDR:?set it to the host name of node 0, the same on all nodes}"
  : "${NODE_RANK:?set it to 0 on node 0, 1 on the next, and so on}"
  export MASTER_PORT=${MASTER_PORT:-29500}
  if ((NODE_RANK == 0)); then
    "$PYTHON" -m mrl.launching.ports --require MASTER_PORT
  fi
  # Gloo would take the address of the host's own name, which is a loopback one on many systems.
  if [[ -z ${GLOO_SOCKET_IFNAME:-} ]]; then
    GLOO_SOCKET_IFNAME=$("$PYTHON" -m mrl.launching.addresses --interface-to "$MASTER_ADDR")
    export GLOO_SOCKET_IFNAME
  fi
  meet=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
else
  meet=(--standalone) # picks a free port itself
  # The store that ranks meet at answers whoever asks: the controller's key is not put there.
  MRL_AUTHKEY=${MRL_AUTHKEY:-$("$PYTHON" -c 'import secrets; print(secrets.token_hex(32))')}
  export MRL_AUTHKEY
fi
config=$1
shift

say_ranks
# Ours come first: a key given twice takes its last value, so yours win.
exec "$PYTHON" -m torch.distributed.run \
  --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE" \
  --max-restarts "${MAX_RESTARTS:-0}" "${meet[@]}" \
  -m mrl.cli train "$config" \
  "trainer.nnodes=$NNODES" "trainer.n_gpus_per_node=$NPROC_PER_NODE" \
  "trainer.max_restarts=${MAX_RESTARTS:-0}" "$@"
