#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes a folder with the GPU tests and benchmarks, to run on a machine that may have no compiler. See --help.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<END
Usage: bash scripts/gpu_bundle.sh [--no-setup] [--build FOLDER] [-DVARIABLE=VALUE...] FOLDER

Builds the tests, benchmarks and trainers that need GPUs (in build/bundle) and copies them to FOLDER. An earlier bundle
in FOLDER is replaced. The bundle contains:

  files.tar.xz    bin/, the programs, and lib/, the shared libraries that they need, without those of the system's C and
                  C++, MPI, CUDA and NCCL
  gpu_verify.sh   unpacks them and runs everything; see bash FOLDER/gpu_verify.sh --help

You can copy FOLDER to any place on any machine. That machine needs the GPU driver, NCCL 2.18 or newer (or
DDP_NCCL_LIBRARY), cuBLAS and cuDNN for the trainers, and Open MPI for the steps under mpirun. If CMake finds a LibTorch
for GPUs, programs that use it are included; there python3 needs the same version of PyTorch. Its C and C++ libraries
must not be older than those of this machine.

  --no-setup        installs nothing
  --build FOLDER    builds in this folder, which must be configured
  -DVARIABLE=VALUE  is passed to CMake
END
}

readonly programs=(gpu_device_test gpu_nccl_test gpu_probe_test gpu_fault_test gpu_recover_test gpu_ddp_test
  gpu_nn_test gpu_c_test gpu_peers_test nccl_policy_test nccl_group_test nccl_failure_test nccl_start_test nccl_timeout_test ddp_probe
  ddp_doctor ddp_perf p2p_bench device_bench unscale_bench exposed_bench train_mlp train_cnn capture_step
  03_cuda_streams)
# In NCCL's place: they misbehave as they are told.
readonly faulty=(faulty_nccl lacking_nccl)
# Built where CMake has found a LibTorch for GPUs. Apart from that they need what train_cnn needs.
torch_programs=(gpu_torch_test train_resnet18)

# Prints the shared libraries to copy for the programs of folder $1, one per line.
libraries_of() {
  local system='^(linux-vdso|ld-linux.*|libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s)\.so|^(libmpi|libopen-rte|libopen-pal)\.so'
  ldd "$1"/* | awk '$2 == "=>" { if ($3 == "not") { print "missing: " $1 > "/dev/stderr"; bad = 1 } else print $3 } END { exit bad }' |
    sort -u | while read -r library; do
    # Libraries that only MPI needs come with MPI.
    [[ $(basename -- "$library") =~ $system ]] || printf '%s\n' "$library"
  done
}

main() {
  local setup=1 folder="" build="" mark=libddp-commit
  local -a cmake_flags=()
  while (($#)); do
    case $1 in
      -h | --help)
        usage
        return
        ;;
      --no-setup) setup=0 ;;
      --build)
        [[ -n ${2-} ]] || die "--build needs a folder"
        build=$(realpath -- "$2")
        shift
        ;;
      -D?*=*) cmake_flags+=("$1") ;;
      -*) die "unknown flag $1; see --help" ;;
      *) folder=$1 ;;
    esac
    shift
  done
  [[ -n $folder ]] || die "no folder is given; see --help"
  # What it writes first, and no other folder has, is the mark of a bundle: an older one is replaced as a whole.
  [[ ! -e $folder || -f $folder/$mark ]] || die "$folder exists and is not a bundle: remove it, or give another folder"

  if [[ -z $build ]]; then
    ((!setup)) || require_packages "${ddp_packages[@]}" "${ddp_test_packages[@]}"
    build=$repo/build/bundle
    configure cuda -B "$build"
  fi
  # RPATH, unlike RUNPATH, also applies to the dependencies of the libraries.
  # shellcheck disable=SC2016 # $ORIGIN is the loader's
  cmake -B "$build" -S "$repo" --log-level=WARNING "${cmake_flags[@]}" '-DCMAKE_BUILD_RPATH=$ORIGIN/../lib' \
    -DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags >/dev/null
  grep -q '^LIBTORCH_CUDA_LIBRARY:FILEPATH=/' "$build/CMakeCache.txt" || torch_programs=()
  cmake --build "$build" --parallel "$(build_jobs)" --target "${programs[@]}" "${faulty[@]}" "${torch_programs[@]}"

  rm -rf -- "$folder"
  mkdir -p -- "$folder/bin" "$folder/lib"
  git -C "$repo" rev-parse HEAD >"$folder/$mark" 2>/dev/null || echo unknown >"$folder/$mark"
  local program
  for program in "${programs[@]}"; do
    strip -o "$folder/bin/$program" "$build/bin/$program"
  done
  for program in "${faulty[@]}"; do
    strip --strip-unneeded -o "$folder/bin/lib$program.so" "$build/bin/lib$program.so"
  done
  libraries_of "$folder/bin" | while read -r library; do
    cp -L -- "$library" "$folder/lib/"
  done
  for program in "${torch_programs[@]}"; do
    strip -o "$folder/bin/$program" "$build/bin/$program"
  done
  # The programs contain the same library: in one archive with a window as large as all of them it is stored once.
  tar -C "$folder" --remove-files -c bin lib | xz --lzma2=preset=1,dict=256MiB >"$folder/files.tar.xz"
  cp -- "$repo"/scripts/gpu_verify{,_training}.sh "$repo/bench/torch_large_mlp.py" "$repo/tests/distributed/torch_parity_test.py" \
    "$repo/tests/fault/auto_fault.sh" "$repo/tests/support/free_port.sh" "$folder/"
  local mib
  mib=$(du -sm -- "$folder" | cut -f1)
  ((mib < 50)) || die "$folder has $mib MiB; it must stay below 50"
  say "$folder: $mib MiB. To run it: bash gpu_verify.sh in that folder"
}

main "$@"
