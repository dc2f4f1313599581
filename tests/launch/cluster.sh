#!/usr/bin/env bash
# Runs a batch script on hosts that are network namespaces of this machine, as Slurm would:
#
#   cluster.sh FOLDER NODES SCRIPT [ARGUMENT ...]
#
# Call it in namespaces of its own (user, network, mount, pid): everything ends with it. The hosts
# node01, node02, ... have an interface, a name, a /tmp/ray each, and 10.77.0.1, .2, ... behind a
# bridge. FOLDER/nodes gets a line "name pid namespace" a host. srun is the one beside this script;
# there is no scontrol, unless FOLDER/bin has one.
set -euo pipefail
folder=$1 count=$2
shift 2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ip link set lo up
ip link add bridge type bridge
ip link set bridge up
{ echo "127.0.0.1 localhost"; for ((i = 1; i <= count; i++)); do echo "10.77.0.$i node0$i"; done; } >"$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts
mkdir -p /tmp/ray
rm -f "$folder"/up*  # of a job before
: >"$folder/nodes"
for ((i = 1; i <= count; i++)); do
  # shellcheck disable=SC2016
  unshare --net --uts --mount bash -c \
    'hostname "$1" && ip link set lo up && mount -t tmpfs tmpfs /tmp/ray && touch "$2" && exec sleep infinity' \
    node "node0$i" "$folder/up$i" &
  pid=$!
  disown # so that bash does not remark upon a host that is killed
  while [[ ! -e $folder/up$i ]]; do kill -0 "$pid"; sleep 0.05; done
  ip link add "port$i" type veth peer name eth0 netns "$pid"
  ip link set "port$i" master bridge up
  nsenter -t "$pid" --net bash -c "ip addr add 10.77.0.$i/24 dev eth0 && ip link set eth0 up"
  echo "node0$i $pid $(readlink "/proc/$pid/ns/net")" >>"$folder/nodes"
done
export CLUSTER=$folder PATH=$here/bin:$folder/bin:$PATH
names=$(cut -d ' ' -f 1 "$folder/nodes" | paste -sd ,)
if ((count == 2)); then names='node[01-02]'; fi
export SLURM_JOB_ID=4711 SLURM_JOB_NODELIST=$names SLURM_JOB_NUM_NODES=$count SLURM_NNODES=$count
export SLURM_SUBMIT_DIR=$PWD SLURM_CPUS_ON_NODE=2 SLURM_JOB_NAME=test
first=$(head -n 1 "$folder/nodes" | cut -d ' ' -f 2)
nsenter -t "$first" --net --uts --mount -- bash "$@" &
status=0
wait "$!" || status=$?
exit "$status"
