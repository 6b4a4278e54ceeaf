# CUDA: architectures, ptxas's figures, and a torch to link to.

# "8.0;9.0;10.0+PTX", also with spaces, to "80-real;90-real;100": a plain number stands for code and PTX.
set(CMAKE_CUDA_ARCHITECTURES "")
string(REGEX REPLACE "[ ,]+" ";" archs "${MOE_EXT_CUDA_ARCHS}")
foreach(arch IN LISTS archs)
  if(NOT arch MATCHES "^([0-9]+)\\.([0-9][af]?)(\\+PTX)?$")
    message(FATAL_ERROR "MOE_EXT_CUDA_ARCHS: expected architectures as in \"8.0;9.0+PTX\", got ${arch}")
  endif()
  if(CMAKE_MATCH_3)
    list(APPEND CMAKE_CUDA_ARCHITECTURES ${CMAKE_MATCH_1}${CMAKE_MATCH_2})
  else()
    list(APPEND CMAKE_CUDA_ARCHITECTURES ${CMAKE_MATCH_1}${CMAKE_MATCH_2}-real)
  endif()
endforeach()

# The static runtime: a torch for another toolkit of the same major version brings another one, and both may be loaded.
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
enable_language(CUDA)
string(APPEND CMAKE_CUDA_FLAGS " --expt-relaxed-constexpr -Xptxas=-v")

# Keeps what ptxas prints of each file beside its object, for tools/kernel_resources.py.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
set(CMAKE_CUDA_COMPILER_LAUNCHER "${Python3_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/tools/ptxas_log.py"
    ${CMAKE_CUDA_COMPILER_LAUNCHER})

# _C_cuda asks libtorch_cuda for the stream. A torch without CUDA has no such library: a stub of the same name stands
# in for it at link time, and the loader finds the real one in the torch that the operators run in.
add_library(torch_cuda_stable INTERFACE)
find_library(TORCH_CUDA_LIBRARY torch_cuda PATHS "${TORCH_LIBRARY_DIR}" NO_DEFAULT_PATH)
if(TORCH_CUDA_LIBRARY)
  target_link_libraries(torch_cuda_stable INTERFACE "${TORCH_CUDA_LIBRARY}")
else()
  file(CONFIGURE OUTPUT torch_cuda_stub.cpp CONTENT [[
extern "C" int aoti_torch_get_current_cuda_stream(int, void**);
__attribute__((visibility("default"))) int aoti_torch_get_current_cuda_stream(int, void**) {
  return 1;
}
]] @ONLY)
  add_library(torch_cuda_stub SHARED "${CMAKE_CURRENT_BINARY_DIR}/torch_cuda_stub.cpp")
  set_target_properties(torch_cuda_stub PROPERTIES OUTPUT_NAME torch_cuda LIBRARY_OUTPUT_DIRECTORY stub)
  target_link_libraries(torch_cuda_stable INTERFACE torch_cuda_stub)
endif()
