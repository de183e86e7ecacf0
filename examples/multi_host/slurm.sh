#!/usr/bin/env bash
# One process per GPU, here on hosts of 8:
#   sbatch --nodes=2 slurm.sh
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
# Submit it from its folder: sbatch runs a copy, from which layer.py could not be found.
srun python "${SLURM_SUBMIT_DIR:?submit this with sbatch}/layer.py" --launcher slurm "$@"
