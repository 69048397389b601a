# SPDX-License-Identifier: Apache-2.0
# Finds LibTorch, in the archive from pytorch.org or in pip's package: CMAKE_PREFIX_PATH (also what `torch.utils.cmake_prefix_path`
# says), else the package of python3. Defines LibTorch::LibTorch, its CPU part, and LibTorch::Cuda, which adds what it needs to work on GPUs; of
# a build without CUDA that is nothing.
#
# Not by Torch's own package: that of a build with CUDA refuses to be found where there is no CUDA toolkit of the same kind, and sets flags for
# everybody.
set(_libtorch_hints)
foreach(_prefix IN LISTS CMAKE_PREFIX_PATH)
  list(APPEND _libtorch_hints ${_prefix} ${_prefix}/../.. ${_prefix}/torch)
endforeach()
if(NOT LIBTORCH_INCLUDE_DIR)
  find_program(DDP_PYTHON3 python3)
  mark_as_advanced(DDP_PYTHON3)
  if(DDP_PYTHON3)
    # Without importing it, which would take seconds.
    execute_process(COMMAND ${DDP_PYTHON3} -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
                    OUTPUT_VARIABLE _libtorch_python OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    list(APPEND _libtorch_hints ${_libtorch_python})
  endif()
endif()
find_path(LIBTORCH_INCLUDE_DIR torch/csrc/api/include/torch/torch.h HINTS ${_libtorch_hints} PATH_SUFFIXES include)
find_library(LIBTORCH_CPU_LIBRARY torch_cpu HINTS ${LIBTORCH_INCLUDE_DIR}/../lib)
find_library(LIBTORCH_C10_LIBRARY c10 HINTS ${LIBTORCH_INCLUDE_DIR}/../lib)
find_library(LIBTORCH_CUDA_LIBRARY torch_cuda HINTS ${LIBTORCH_INCLUDE_DIR}/../lib)
mark_as_advanced(LIBTORCH_INCLUDE_DIR LIBTORCH_CPU_LIBRARY LIBTORCH_C10_LIBRARY LIBTORCH_CUDA_LIBRARY)

# ddp/torch.h asks for a stream's native handle without CUDA's headers, which LibTorch can tell since 2.11.
set(LIBTORCH_2_11_OR_NEWER)
set(_libtorch_streams ${LIBTORCH_INCLUDE_DIR}/c10/core/impl/DeviceGuardImplInterface.h)
if(EXISTS ${_libtorch_streams})
  file(STRINGS ${_libtorch_streams} LIBTORCH_2_11_OR_NEWER REGEX getStreamNativeHandle)
endif()

# A LibTorch built with the std::string of before C++11 (pip's until 2.6) cannot be linked with anything of this decade.
if(LIBTORCH_CPU_LIBRARY AND LIBTORCH_C10_LIBRARY)
  include(CheckCXXSourceCompiles)
  set(CMAKE_REQUIRED_LIBRARIES ${LIBTORCH_CPU_LIBRARY} ${LIBTORCH_C10_LIBRARY})
  check_cxx_source_compiles(
    "#include <string>\nnamespace at { std::string show_config(); }\nint main() { return at::show_config().empty(); }" LIBTORCH_CXX11_ABI)
  unset(CMAKE_REQUIRED_LIBRARIES)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch REQUIRED_VARS LIBTORCH_CPU_LIBRARY LIBTORCH_C10_LIBRARY LIBTORCH_INCLUDE_DIR LIBTORCH_CXX11_ABI
                                  LIBTORCH_2_11_OR_NEWER)
if(LibTorch_FOUND AND NOT TARGET LibTorch::LibTorch)
  add_library(LibTorch::LibTorch INTERFACE IMPORTED GLOBAL)
  set_target_properties(
    LibTorch::LibTorch
    PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${LIBTORCH_INCLUDE_DIR};${LIBTORCH_INCLUDE_DIR}/torch/csrc/api/include"
               INTERFACE_LINK_LIBRARIES "${LIBTORCH_CPU_LIBRARY};${LIBTORCH_C10_LIBRARY}")
  add_library(LibTorch::Cuda INTERFACE IMPORTED GLOBAL)
  set_target_properties(LibTorch::Cuda PROPERTIES INTERFACE_LINK_LIBRARIES LibTorch::LibTorch)
  if(LIBTORCH_CUDA_LIBRARY)
    # No symbol of it is used: what it has registers itself when it is loaded.
    set_property(TARGET LibTorch::Cuda APPEND PROPERTY INTERFACE_LINK_LIBRARIES
                                               "-Wl,--push-state,--no-as-needed,${LIBTORCH_CUDA_LIBRARY},--pop-state")
  endif()
endif()
