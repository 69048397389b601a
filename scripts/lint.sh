#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks formatting (clang-format 14), scripts (shellcheck), licence lines, documentation and the library's sources (clang-tidy 14). See --help.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<END
Usage: bash scripts/lint.sh [--no-setup] [FILE...]

Checks the formatting of all sources, runs shellcheck on all scripts, looks for each source's licence line, builds the documentation site, where dead links and
public names without a comment are errors, and runs clang-tidy on FILEs (default: all sources in libddp). Prints what to
change, and changes no source itself.

  --no-setup  installs nothing
END
}

# Prints the tracked files that match the patterns. Without Git (an unpacked archive): all files that match.
files_like() {
  if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    git ls-files -z -- "$@"
  else
    local pattern names=()
    for pattern in "$@"; do names+=(-o -path "./$pattern"); done
    find . -path ./build -prune -o -type f \( "${names[@]:1}" \) -print0
  fi
}

main() {
  local setup=1 failed=0
  local -a files=()
  while (($#)); do
    case $1 in
      -h | --help)
        usage
        return
        ;;
      --no-setup) setup=0 ;;
      -*) die "unknown flag $1; see --help" ;;
      *)
        [[ -f $1 ]] || die "no such file: $1"
        files+=("$(realpath -- "$1")")
        ;;
    esac
    shift
  done
  ((!setup)) || require_packages "${ddp_packages[@]}" "${ddp_test_packages[@]}" clang clang-format-14 clang-tidy-14 shellcheck \
    "${ddp_site_packages[@]}"
  cd "$repo"

  say "clang-format"
  files_like '*.h' '*.cc' | xargs -0 clang-format-14 --dry-run -Werror || failed=1
  say "shellcheck"
  files_like '*.sh' '.ci/run' | xargs -0 shellcheck -x || failed=1
  say "licence"
  local unnamed
  unnamed=$(files_like '*.h' '*.cc' '*.cu' '*.cuh' '*.c' '*.cmake' '*CMakeLists.txt' '*.sh' '*.py' |
    xargs -0 grep -L 'SPDX-License-Identifier: Apache-2.0' || true)
  if [[ -n $unnamed ]]; then
    printf 'error: these do not begin with the line "SPDX-License-Identifier: Apache-2.0":\n%s\n' "$unnamed"
    failed=1
  fi
  say "documentation"
  python3 bench/draw_beside_pytorch.py --check || failed=1
  local missing
  missing=$(missing_packages "${ddp_site_packages[@]}")
  if [[ -z $missing ]]; then
    bash scripts/site.sh --no-setup || failed=1
  else
    python3 scripts/check_links.py || failed=1
    echo "not checked: the documentation site; install ${missing//$'\n'/ }"
  fi

  # clang-tidy needs the compile commands of a configured build folder. Nothing has to be built.
  local build
  if ((${#files[@]} == 0)); then
    # All of the library: CMake puts eight sources into one ("unity build"), and the headers that they share are read once.
    # What this build leaves out, like the CUDA backend, is not checked.
    build=build/lint
    configure asan -B "$repo/$build" -DCMAKE_UNITY_BUILD=ON -DDDP_BUILD_TESTS=OFF -DDDP_BUILD_BENCH=OFF -DDDP_BUILD_EXAMPLES=OFF
    mapfile -t files < <(sed -n 's/^ *"file": "\(.*\)",*$/\1/p' "$build/compile_commands.json")
  else
    build=build/lint-files
    configure asan -B "$repo/$build" -DCMAKE_UNITY_BUILD=OFF -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON
    local file
    for file in "${files[@]}"; do
      grep -qF "$file\"" "$build/compile_commands.json" || die "$file is not compiled in $build: clang-tidy cannot check it"
    done
  fi
  say "clang-tidy"
  # A unity source includes .cc files, which bugprone-suspicious-include would report.
  printf '%s\0' "${files[@]}" |
    xargs -0 -n 1 -P "$(build_jobs)" clang-tidy-14 -p "$build" --quiet --checks=-bugprone-suspicious-include \
      --warnings-as-errors='*' 2> >(grep -v 'warnings generated' >&2) || failed=1
  ((!failed)) || die "lint found problems; see above"
  say "lint found no problems"
}

main "$@"
