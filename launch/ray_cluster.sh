#!/usr/bin/env bash
# A Ray cluster by hand, and a run on it:
#
#   RAY_ADDRESS=HOST:PORT launch/ray_cluster.sh head      on the first host, which HOST is
#   RAY_ADDRESS=HOST:PORT launch/ray_cluster.sh worker    on each of the others
#   RAY_ADDRESS=HOST:PORT launch/ray_cluster.sh run NODES CONFIG [key=value ...]
#
# `head` and `worker` stay until they are ended; `run` waits until NODES hosts are there.
# Environment: NPROC_PER_NODE (GPUs), RAY_WAIT_S (300), RAY_AUTH_MODE (token: all hosts need the same
# one, in RAY_AUTH_TOKEN or, on a shared home, from `ray get-auth-token --generate`).
set -euo pipefail
trap '' USR1 # Slurm sends it to every process of a step: all ignore it but the controller
if (($# == 0)) || [[ -z ${RAY_ADDRESS:-} ]]; then
  sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
# shellcheck source=launch/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# Unset, Ray's head takes a token that it finds and its workers do not: they could not join.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
host=${RAY_ADDRESS%:*} port=${RAY_ADDRESS##*:}
gpus=$("$PYTHON" -m mrl.launching.devices)
ray=("$PYTHON" -m ray.scripts.scripts start --disable-usage-stats --block --num-gpus="$gpus")
((gpus)) || ray+=(--num-cpus="$NPROC_PER_NODE") # a rank takes a CPU: as many as asked for
case $1 in
  head)
    say_ranks
    echo "[launch] $(hostname): head of the Ray cluster at $RAY_ADDRESS" >&2
    unset RAY_ADDRESS # `ray start --head` refuses to join another cluster
    exec "${ray[@]}" --head --node-ip-address="$host" --port="$port" --include-dashboard=false \
      >/dev/null # how to join by hand, at length; errors are on the other stream
    ;;
  worker)
    # Ray looks for its own address by a route to the internet, which a cluster may not have.
    own=$("$PYTHON" -m mrl.launching.addresses)
    for ((second = 0; second < ${RAY_WAIT_S:-300}; second++)); do # the head may come up later
      (exec 3<>"/dev/tcp/$host/$port") 2>/dev/null && break
      sleep 1
    done
    say_ranks
    exec "${ray[@]}" --address="$RAY_ADDRESS" --node-ip-address="$own" >/dev/null
    ;;
  run)
    # A driver that starts early would see too few ranks' places.
    "$PYTHON" -m mrl.workers.ray_nodes "$2" "${RAY_WAIT_S:-300}"
    exec "$PYTHON" -m mrl.cli train "$3" trainer.launcher=ray "trainer.nnodes=$2" \
      "trainer.n_gpus_per_node=$NPROC_PER_NODE" "${@:4}"
    ;;
  *)
    echo "launch/ray_cluster.sh: $1? head, worker or run" >&2
    exit 2
    ;;
esac
