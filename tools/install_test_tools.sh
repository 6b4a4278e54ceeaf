#!/usr/bin/env bash
# Installs what the tests use of Debian where it is missing and this user may: GoogleTest, which CMake downloads otherwise, and
# valgrind, without which the instruction counts are skipped. Fails never.
set -uo pipefail
missing=()
echo '#include <gtest/gtest.h>' | c++ -x c++ -fsyntax-only - 2>/dev/null || missing+=(libgtest-dev)
command -v valgrind >/dev/null || missing+=(valgrind)
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
if [ "${#missing[@]}" -gt 0 ] && command -v apt-get >/dev/null && "${as_root[@]}" true 2>/dev/null; then
  echo "make test: installing ${missing[*]}"
  "${as_root[@]}" apt-get update -qq
  for package in "${missing[@]}"; do
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package" >/dev/null
  done
fi
exit 0
