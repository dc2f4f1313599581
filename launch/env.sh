# Environment of every launch script; source it. A value that is already set is kept.
#
#   NPROC_PER_NODE                ranks on this node: the visible GPUs, 1 without any
#   OMP_NUM_THREADS               cores this process may use / ranks on this node. torchrun and Ray
#                                 would set 1, which starves a CPU-offloaded optimizer; unset, every
#                                 rank would take all cores.
#   CUDA_DEVICE_MAX_CONNECTIONS   1: Megatron orders its communication before its kernels this way
#                                 (tensor and context parallelism overlap only then)
#   VLLM_USE_FLASHINFER_SAMPLER   0: the sampler would be compiled on first use, about 110 s
#   VLLM_ENABLE_V1_MULTIPROCESSING 0: the engine lives in the worker process
#
# NCCL_* is left to you: the right interface and transports are facts of your cluster.

visible_gpus() {
  if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    awk -F, '{print ($0 == "" || $1 < 0) ? 0 : NF}' <<<"$CUDA_VISIBLE_DEVICES"
  elif command -v nvidia-smi >/dev/null; then
    nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true
  else
    echo 0
  fi
}

if [[ -z ${NPROC_PER_NODE:-} ]]; then
  NPROC_PER_NODE=$(visible_gpus)
  ((NPROC_PER_NODE > 0)) || NPROC_PER_NODE=1
fi
if [[ -z ${OMP_NUM_THREADS:-} ]]; then
  cores=$(nproc) # honours affinity and cgroup CPU sets
  OMP_NUM_THREADS=$((cores / NPROC_PER_NODE > 0 ? cores / NPROC_PER_NODE : 1))
fi
export NPROC_PER_NODE OMP_NUM_THREADS
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0}
export VLLM_ENABLE_V1_MULTIPROCESSING=${VLLM_ENABLE_V1_MULTIPROCESSING:-0}
echo "[launch] $(hostname): $NPROC_PER_NODE ranks, OMP_NUM_THREADS=$OMP_NUM_THREADS" >&2
