# shellcheck shell=bash
# Sourced by scripts/ports: their command line, and the environment, tests and times of what is ported.

# shellcheck source=scripts/lib/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
export OMP_NUM_THREADS=1 PYTHONPATH=$root/docs/ports # the ranks share the cores; plug-ins

# port_options OPTIONS ARGUMENTS...: sets `folder`, and where they are given `url` and `left_out`.
# OPTIONS are those of the script.
# shellcheck disable=SC2034  # for the caller
port_options() {
  local known=" -h --help $1 "
  shift
  folder=''
  while (($#)); do
    [[ $1 != -* || $known == *" $1 "* ]] || fail "unknown option $1"
    case $1 in
      -h | --help) usage && exit ;;
      --source) url=${2:?--source needs a URL or a folder} && shift ;;
      --large) left_out='' ;;
      *) folder=$1 ;;
    esac
    shift
  done
  own_folder "$folder"
}

# port_sources: clones `url` at `version` into `tree`, where it is missing.
# shellcheck disable=SC2154  # of the caller
port_sources() {
  [[ ! -d $tree ]] || return 0
  git clone -q "$url" "$tree" || fail "no sources from $url: name another place by --source"
  git -C "$tree" -c advice.detachedHead=false checkout -q "$version"
}

# port_environment PACKAGE...: puts the folder's environment first on PATH, made where it is missing,
# and installs these packages, MPICH and mpishare in it.
# shellcheck disable=SC2154  # root is of env.sh
port_environment() {
  [[ -d $folder/venv ]] || "$(find_python)" -m venv "$folder/venv"
  export PATH=$folder/venv/bin:$PATH
  python -m pip install -q "$@" mpi4py mpich "$root"
}

# use_fftw: lets compilers and programs find FFTW in FFTW_ROOT, if it is set.
use_fftw() {
  [[ -n ${FFTW_ROOT:-} ]] || return 0
  export CPATH=$FFTW_ROOT/include LIBRARY_PATH=$FFTW_ROOT/lib LD_LIBRARY_PATH=$FFTW_ROOT/lib
}

# run_tests RANKS with|without OPTIONS...: runs tests of the code that the script is named after, by
# pytest with these options.
run_tests() {
  printf '== %s ranks, %s mpishare: %s\n' "$1" "$2" "${*:3}"
  mpirun -n "$1" python -m mpi4py "$root/scripts/ports/run_tests.py" "${0##*/}" "${@:2}"
}

# compare_times: compares bits and times of both ways on two ranks.
compare_times() {
  PYTHONPATH+=:$root/scripts/lib # in_turns
  mpirun -n 2 python -W ignore -m mpi4py "$root/scripts/ports/${0##*/}_times.py"
}
