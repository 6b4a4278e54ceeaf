#!/usr/bin/env bash
# Installs GoogleTest from Debian's libgtest-dev where its header is missing; otherwise does nothing.
set -euo pipefail
echo '#include <gtest/gtest.h>' | c++ -x c++ -fsyntax-only - 2>/dev/null && exit 0
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  as_root=(sudo -n)
fi
if ! command -v apt-get >/dev/null || ! "${as_root[@]}" true 2>/dev/null; then
  echo "make test: GoogleTest is missing and cannot be installed here; install libgtest-dev (or your system's package of it)" >&2
  exit 1
fi
echo "make test: installing libgtest-dev"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libgtest-dev >/dev/null
