#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the documentation site. See --help.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<END
Usage: bash scripts/site.sh [--no-setup] [--names]

Builds the documentation site from README.md, docs/ and the public headers: build/site/html/index.html. A public name
without a comment, a dead link, and a page that is not in the contents (docs/site/contents.md) are errors.

  --no-setup  installs nothing
  --names     only looks for public names without a comment
END
}

# The pages, in build/site/source: README.md and the contents are the first one; the others lie where they do here.
stage() {
  local source=build/site/source name
  rm -rf -- "$source"
  mkdir -p -- "$source"
  cat README.md docs/site/contents.md >"$source/index.md"
  for name in CHANGELOG.md CITATION.cff CONTRIBUTING.md LICENSE NOTICE SECURITY.md docs examples include python; do
    [[ ! -e $name ]] || ln -s -- "$repo/$name" "$source/$name"
  done
}

main() {
  local setup=1 names_only=0
  while (($#)); do
    case $1 in
      -h | --help)
        usage
        return
        ;;
      --no-setup) setup=0 ;;
      --names) names_only=1 ;;
      *) die "unknown argument $1; see --help" ;;
    esac
    shift
  done
  ((!setup)) || require_packages "${ddp_site_packages[@]}"
  cd "$repo"
  ((names_only)) || python3 scripts/check_links.py
  mkdir -p build/site
  say "Reading the public headers"
  rm -rf -- build/site/doxygen
  if ! { doxygen docs/site/Doxyfile && python3 docs/site/constants.py build/site/doxygen/xml; }; then
    die "names of the public headers have no comment; see above"
  fi
  ((!names_only)) || return 0
  say "Making the pages"
  stage
  sphinx-build -q -E -W --keep-going -j auto -c docs/site -d build/site/doctrees build/site/source build/site/html
  say "The site is $repo/build/site/html/index.html"
}

main "$@"
