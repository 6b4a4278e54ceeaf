#!/usr/bin/env bash
# Installs what the tests want of Debian where it is missing: GoogleTest, which they need, and valgrind, without which the
# instruction counts are skipped.
set -euo pipefail
has_gtest() {
  echo '#include <gtest/gtest.h>' | c++ -x c++ -fsyntax-only - 2>/dev/null
}
missing=()
has_gtest || missing+=(libgtest-dev)
command -v valgrind >/dev/null || missing+=(valgrind)
if [ "${#missing[@]}" -eq 0 ]; then
  exit 0
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  as_root=(sudo -n)
fi
if command -v apt-get >/dev/null && "${as_root[@]}" true 2>/dev/null; then
  echo "make test: installing ${missing[*]}"
  "${as_root[@]}" apt-get update -qq || true
  for package in "${missing[@]}"; do
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package" >/dev/null || true
  done
fi
command -v valgrind >/dev/null || echo "make test: valgrind is missing, the instruction counts will be skipped" >&2
if ! has_gtest; then
  echo "make test: GoogleTest is missing and cannot be installed here; install libgtest-dev (or your system's package of it)" >&2
  exit 1
fi
