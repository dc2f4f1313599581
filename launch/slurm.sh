# What both Slurm scripts share; source it. Needs no scontrol but to requeue.
#
# Sets nodes (host names), MASTER_ADDR and MASTER_PORT (kept free until they are used) and run
# (the overrides of this run of a job array), and gives `finish`.

mapfile -t nodes < <("$PYTHON" -m mrl.launching.nodes "$SLURM_JOB_NODELIST")
((${#nodes[@]})) || exit 1

# This script runs on the first node, so its own address is the head's.
[[ -n ${MASTER_ADDR:-} ]] || MASTER_ADDR=$("$PYTHON" -m mrl.launching.addresses)
if [[ -z ${MASTER_PORT:-} ]]; then
  coproc PORT_HOLDER { exec "$PYTHON" -m mrl.launching.ports; }
  read -r MASTER_PORT <&"${PORT_HOLDER[0]}"
fi
export MASTER_ADDR MASTER_PORT
echo "[launch] ${#nodes[@]} nodes (${nodes[*]}), head $MASTER_ADDR:$MASTER_PORT" >&2

run=()
if [[ -n ${MRL_SWEEP:-} ]]; then
  mapfile -d '' -t run < <("$PYTHON" -m mrl.launching.sweep "$MRL_SWEEP" "${SLURM_ARRAY_TASK_ID:?submit with --array}")
  ((${#run[@]})) || exit 1
fi

stopping='' run_pid=''
stop() { # Slurm says that the time is nearly up: ask the run for a checkpoint
  stopping=1
  echo "[launch] asking for a checkpoint: the job ends after the step in hand" >&2
  [[ -z $run_pid ]] || kill -USR1 "$run_pid" 2>/dev/null || true # srun hands it on
}
trap stop USR1 TERM

finish() { # pid of the run, pids that must not end before it: wait, requeue if asked to stop, exit
  run_pid=$1
  local ended status
  while :; do
    status=0
    wait -n -p ended "$@" || status=$?
    [[ -z ${ended:-} ]] || break # without: a signal came, and was handled
  done
  if [[ $ended != "$run_pid" ]]; then
    echo "[launch] a node left the job (its step ended with status $status)" >&2
    exit 1
  fi
  if ((status == 0)) && [[ -n $stopping ]]; then
    if command -v scontrol >/dev/null; then
      scontrol requeue "$SLURM_JOB_ID" # of an array: the one run's own number
    else
      echo "[launch] no scontrol here: submit the same line again, it resumes" >&2
    fi
  fi
  exit "$status"
}
