"""What a run tells: metrics, timings, FLOPs, TensorBoard, console, dumps."""
