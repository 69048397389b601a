# Shared by the scripts of this folder; sourced, not run.
# shellcheck shell=bash

repo=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '==> %s\n' "$*"; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# What the whole project needs, by the names of Debian 12 and Ubuntu 24.04.
# shellcheck disable=SC2034 # read by the scripts
ddp_packages=(
  g++ cmake ninja-build pkg-config
  libabsl-dev libspdlog-dev libhwy-dev libhwloc-dev libasio-dev libssl-dev openmpi-bin libopenmpi-dev # the library
  libdnnl-dev nlohmann-json3-dev zlib1g-dev                                                           # the examples
  catch2 libbenchmark-dev                                                                             # tests and benchmarks
)

# Prints those of the packages named that are not installed, one a line.
missing_packages() {
  local installed package
  installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' "$@" 2>/dev/null | sed -n 's/^installed //p' || true)
  for package in "$@"; do
    grep -qxF -- "$package" <<<"$installed" || printf '%s\n' "$package"
  done
}

# Installs those of the packages named that are missing. Where that cannot be done, says what to install, and stops.
require_packages() {
  if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    die "this system has no apt-get. Install what these Debian packages hold, then run again with --no-setup: $*"
  fi
  local missing=() sudo=()
  mapfile -t missing < <(missing_packages "$@")
  ((${#missing[@]})) || return 0
  if ((EUID != 0)); then
    if ! command -v sudo >/dev/null || ! sudo -n true 2>/dev/null; then
      die "packages are missing, and neither root nor sudo without a password is at hand. Run this as root, then try again:
  apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
    fi
    sudo=(sudo)
  fi
  say "Installing ${missing[*]}"
  local apt=("${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300)
  # A stale list names versions that the server no longer has; a list that cannot be refreshed may still do.
  "${apt[@]}" update </dev/null || say "apt-get update failed; going on with the lists there are"
  "${apt[@]}" install -y --no-install-recommends "${missing[@]}" </dev/null >/dev/null ||
    die "apt-get could not install: ${missing[*]}"
}

# How many compilers to run at once: one per processor, and 2 GB of memory for each.
build_jobs() {
  local cpus memory_kb limit
  cpus=$(nproc)
  memory_kb=$(sed -n 's/^MemAvailable: *\([0-9]*\) kB/\1/p' /proc/meminfo)
  if limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null) && [[ $limit =~ ^[0-9]+$ ]] && ((limit / 1024 < memory_kb)); then
    memory_kb=$((limit / 1024))
  fi
  local by_memory=$((memory_kb / 2000000))
  ((by_memory < cpus)) && cpus=$by_memory
  echo $((cpus > 0 ? cpus : 1))
}

# configure PRESET [CMAKE_ARGUMENT...]: makes or refreshes build/PRESET.
configure() {
  local preset=$1 build="$repo/build/$1" home
  shift
  # A build folder that came along with a moved or copied tree belongs to the old place, and CMake refuses it.
  home=$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$build/CMakeCache.txt" 2>/dev/null || true)
  if [[ -d $build && $home != "$repo" ]]; then
    rm -rf -- "$build"
  fi
  say "Configuring $preset"
  (cd "$repo" && cmake --preset "$preset" --log-level=WARNING "$@" >/dev/null)
}

# build PRESET [TARGET...]
build() {
  local preset=$1 jobs targets=()
  shift
  jobs=$(build_jobs)
  (($# == 0)) || targets=(--target "$@")
  say "Building $preset, $jobs at a time"
  cmake --build "$repo/build/$preset" --parallel "$jobs" "${targets[@]}"
}

# The mpirun that belongs to the MPI which PRESET was built with; empty if it was built without.
mpirun_of() {
  sed -n 's/^MPIEXEC_EXECUTABLE:[A-Z]*=//p' "$repo/build/$1/CMakeCache.txt" | grep -v NOTFOUND || true
}

# Open MPI refuses to run as root, and to start more ranks than there are cores, unless told to. allow_mpirun RANKS sets the
# environment for the first and fills the array mpirun_flags for the second.
allow_mpirun() {
  local ranks=$1 cores
  mpirun_flags=()
  if ((EUID == 0)); then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
  # Open MPI counts cores, nproc counts hardware threads.
  cores=$(lscpu -p=CORE,SOCKET 2>/dev/null | grep -v '^#' | sort -u | wc -l || true)
  if ((cores < 1 || cores > $(nproc))); then
    cores=$(nproc)
  fi
  if ((ranks > cores)); then
    # shellcheck disable=SC2034 # read by the caller
    mpirun_flags=(--oversubscribe)
  fi
}
