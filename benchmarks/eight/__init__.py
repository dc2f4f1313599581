"""What `benchmarks/eight_gpus.py` measures, part by part; each entry is kept when it is done."""
