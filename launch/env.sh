# shellcheck shell=bash
# Environment of every launch script; source it. A value that is already set is kept.
#
#   PYTHON                        .venv/bin/python beside this folder where there is one, else python3
#   NPROC_PER_NODE                ranks on this node: the visible GPUs, 1 without any
#   OMP_NUM_THREADS               cores this process may use / ranks on this node. torchrun and Ray
#                                 would set 1, which starves a CPU-offloaded optimizer; unset, every
#                                 rank would take all cores.
#   CUDA_DEVICE_MAX_CONNECTIONS   1: Megatron orders its communication before its kernels this way
#                                 (tensor and context parallelism overlap only then)
#   VLLM_USE_FLASHINFER_SAMPLER   0: the sampler would be compiled on first use, about 110 s
#   VLLM_ENABLE_V1_MULTIPROCESSING 0: the engine lives in the worker process
#   TORCH_NCCL_ASYNC_ERROR_HANDLING 1: a collective that fails ends its rank instead of hanging it
#
# Left to you, since they are facts of your cluster: NCCL_SOCKET_IFNAME (the interface that NCCL
# meets over; it also chooses the head's address), NCCL_IB_HCA (which adapters carry its traffic),
# NCCL_DEBUG=INFO (what it chose). NCCL_CUMEM_ENABLE=0 is vLLM's own setting for its groups.

launch_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=$launch_folder/../.venv/bin/python
  [[ -x $PYTHON ]] || PYTHON=python3
fi
if [[ -z ${NPROC_PER_NODE:-} ]]; then
  NPROC_PER_NODE=$("$PYTHON" -m mrl.launching.devices)
  ((NPROC_PER_NODE > 0)) || NPROC_PER_NODE=1
fi
if [[ -z ${OMP_NUM_THREADS:-} ]]; then
  cores=$(nproc) # honours affinity and cgroup CPU sets
  OMP_NUM_THREADS=$((cores / NPROC_PER_NODE > 0 ? cores / NPROC_PER_NODE : 1))
fi
export PYTHON NPROC_PER_NODE OMP_NUM_THREADS
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0}
export VLLM_ENABLE_V1_MULTIPROCESSING=${VLLM_ENABLE_V1_MULTIPROCESSING:-0}
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}

say_ranks() { # where ranks are about to start
  local seen="CUDA_VISIBLE_DEVICES is not set"
  [[ -z ${CUDA_VISIBLE_DEVICES+set} ]] || seen="CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES"
  echo "[launch] $(hostname): $NPROC_PER_NODE ranks, OMP_NUM_THREADS=$OMP_NUM_THREADS, $seen" >&2
}
