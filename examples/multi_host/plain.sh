#!/usr/bin/env bash
# Without a launcher. On every host, with its own ID, 0 on HOST:
#   ./plain.sh HOST:PORT N_HOSTS ID
# Two processes on this machine, with 4 virtual CPU devices each:
#   ./plain.sh localhost:12345 2 0 --cpus 4 & ./plain.sh localhost:12345 2 1 --cpus 4
exec python "$(dirname "$0")/layer.py" --coordinator "${1:?host:port of process 0}" \
  --n-processes "${2:?the number of processes}" --process-id "${3:?the index of this one}" "${@:4}"
