"""Starting a job: hosts, addresses, ports and devices, Slurm scripts, the check of a machine."""
