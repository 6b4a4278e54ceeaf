#!/bin/bash
# A compiler launcher for CMake: takes the object of the same name from the build folder REUSED_BUILD, and compiles where
# that has none. Those of _C serve any torch, those of _runtime the one in the folder's name; _C_cuda is always compiled.
for word; do [ "$last" = -o ] && object=$word; last=$word; done
rm -f "$object"
case "$*" in
  *_C_cuda.dir*) exec "$@" ;;
  *MOE_EXT_TORCH_VERSION=*"${REUSED_BUILD##*/cmake-}"*) ;;
  *MOE_EXT_TORCH_VERSION=*) exec "$@" ;;
esac
# A link: one that is made anew there is newer here too.
[ -f "$REUSED_BUILD/$object" ] && exec ln -s "$REUSED_BUILD/$object" "$object"
exec "$@"
