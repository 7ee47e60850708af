# shellcheck shell=bash
# Sourced by scripts/ports: their command line, and the environment of what is ported.

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

# port_environment PACKAGE...: puts the folder's environment first on PATH, made where it is missing,
# and installs these packages, MPICH and mpishare in it.
# shellcheck disable=SC2154  # root is of env.sh
port_environment() {
  [[ -d $folder/venv ]] || "$(find_python)" -m venv "$folder/venv"
  export PATH=$folder/venv/bin:$PATH
  python -m pip install -q "$@" mpi4py mpich "$root"
}
