#!/usr/bin/env bash
# One process per GPU, on the hosts of an Open MPI host file:
#   ./openmpi.sh HOSTFILE GPUS_PER_HOST
exec mpirun --hostfile "${1:?the host file}" --map-by "ppr:${2:?GPUs per host}:node" \
  python "$(dirname "$0")/layer.py" --launcher ompi "${@:3}"
