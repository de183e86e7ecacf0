# shellcheck shell=bash
# Sourced by scripts that need several versions of Python.

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null; }

# find_python X.Y: prints the path of an interpreter of that version: one of PYTHONS, if it is set;
# otherwise pythonX.Y on PATH, then those of pyenv.
find_python() {
  local candidate candidates=("python$1")
  candidates+=("${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python)
  if [[ -n ${PYTHONS:-} ]]; then
    read -ra candidates <<< "$PYTHONS"
  fi
  for candidate in "${candidates[@]}" "${PYTHON:-python3}"; do
    if [[ $(version_of "$candidate") == "$1" ]]; then
      echo "$candidate"
      return
    fi
  done
  return 1
}
