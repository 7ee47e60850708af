# shellcheck shell=bash
# Sourced by the scripts beside it: the environment they run in, and how they start ranks.

# Asked for before an environment is loaded, whose Python must not make the next one.
outer_python=${PYTHON:-} outer_path=$PATH
# Python keeps what it compiled: the tests start thousands of processes.
unset PYTHONDONTWRITEBYTECODE
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)

# The comment at the head of the script that is run.
usage() {
  sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"
}

fail() {
  printf '%s: %s\n' "${0##*/}" "$1" >&2
  exit 2
}

# The first Python that is new enough; PYTHON names another.
find_python() {
  local name
  for name in ${outer_python:+"$outer_python"} python3 python3.14 python3.13 python3.12 python3.11; do
    if command -v "$name" >/dev/null &&
      "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  fail "Python 3.11 or newer is needed, and none is on PATH (PYTHON=... names one)"
}

# environment NAME [options of environment.py]: makes NAME in the repository when it is missing or
# old, then sets PYTHON, MPIRUN and MPI_KIND. All that it prints goes to stderr.
environment() {
  local name=$1 python
  shift
  python=$(PATH=$outer_path find_python) || return
  PATH=$outer_path "$python" "$root/scripts/lib/environment.py" "$root/$name" "$@" >&2 || return 1
  # shellcheck source=/dev/null
  source "$root/$name/env.sh"
}

# launcher N: sets `launch` to the words that start N ranks.
launcher() {
  launch=("$MPIRUN" -n "$1")
  [[ $MPI_KIND == openmpi ]] || return 0
  launch+=(--bind-to none) # a rank bound to one core starves its threads
  # Without it a barrier of more ranks than cores takes milliseconds.
  if (($1 > $(nproc))); then export OMPI_MCA_mpi_yield_when_idle=1; fi
}

# own_folder NAME: makes the folder when it is missing, and sets `folder` to where it is.
own_folder() {
  [[ -n $1 ]] || fail "a folder is needed (--help)"
  mkdir -p "$1"
  [[ -O $1 ]] || fail "$1 belongs to another user, whose programs are not to be run"
  # shellcheck disable=SC2034  # the script that calls reads it
  folder=$(cd "$1" && pwd -P)
}
