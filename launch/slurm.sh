# shellcheck shell=bash
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

stopping=''
stop() { # Slurm says that the time is nearly up
  [[ -n $stopping ]] ||
    echo "[launch] the time is nearly up: the run saves after the step in hand" >&2
  stopping=1
}
trap stop USR1 TERM

finish() { # pid of the run, then, in the order of nodes, pids that must not end before it
  local run_pid=$1 ended='' status=0 second=0 pid
  while [[ -z $ended ]]; do
    sleep 1 & # a signal ends the wait for it, not the sleep
    wait "$!" || true
    for pid in "$@"; do
      kill -0 "$pid" 2>/dev/null || { ended=$pid && break; }
    done
    # Again and again: a run that is still starting does not listen yet. srun hands it on.
    if [[ -n $stopping ]] && ((second++ % 5 == 0)); then
      kill -USR1 "$run_pid" 2>/dev/null || true
    fi
  done
  if [[ $ended == "$run_pid" ]]; then
    wait "$run_pid" || status=$?
    ((status == 0 || $# == 1)) || sleep 1 # its cause may be a node that left
  else
    for ((second = 0; second < 10; second++)); do # the run may tell which rank it lost
      kill -0 "$run_pid" 2>/dev/null || break
      sleep 1
    done
    status=1
  fi
  ((status == 0)) || name_lost_node "${@:2}"
  [[ -z ${last_word:-} ]] || wait "$last_word" 2>/dev/null || true
  if ((status == 0)) && [[ -n $stopping ]]; then
    if command -v scontrol >/dev/null; then
      echo "[launch] job $SLURM_JOB_ID is queued again, to resume from its last checkpoint" >&2
      scontrol requeue "$SLURM_JOB_ID" # of an array: the one run's own number
    else
      echo "[launch] no scontrol here: submit the same line again, it resumes" >&2
    fi
  fi
  exit "$status"
}

name_lost_node() { # pids in the order of nodes
  local index pids=("$@") how status=0
  for index in "${!pids[@]}"; do
    kill -0 "${pids[index]}" 2>/dev/null && continue
    wait "${pids[index]}" || status=$?
    how="with status $status"
    ((status <= 128)) || how="by SIG$(kill -l "$((status - 128))")"
    echo "[launch] ${nodes[index]} left the job: its step ended $how" >&2
    return
  done
}
