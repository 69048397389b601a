# SPDX-License-Identifier: Apache-2.0
# What the user may choose, and the flags that every target of the project is built with.

if(PROJECT_IS_TOP_LEVEL)
  set(_ddp_extras ON)
else()
  set(_ddp_extras OFF)
endif()

set(DDP_WITH_MPI AUTO CACHE STRING "Start under MPI: AUTO (if found), ON (required) or OFF")
set(DDP_WITH_HWLOC AUTO CACHE STRING "Ask hwloc which processors are close to each other: AUTO (if found), ON (required) or OFF")
set(DDP_WITH_NVTX AUTO CACHE STRING "Ranges for NVIDIA's tools: AUTO (if the NVTX headers are found), ON (required) or OFF")
set(DDP_WITH_JPEG AUTO CACHE STRING "The trainers read JPEG files: AUTO (if libjpeg-turbo is found), ON (required) or OFF")
set(DDP_WITH_LIBTORCH AUTO CACHE STRING "ddp::torch and examples/libtorch: AUTO (with the examples, if LibTorch is found), ON (required) or OFF")
set(DDP_WITH_CUDA AUTO CACHE STRING "Work on NVIDIA GPUs: AUTO (if CUDA 12.8 or newer is found), ON (required) or OFF")
set(DDP_WITH_NCCL AUTO CACHE STRING "The NCCL backend: AUTO (with CUDA), ON or OFF; NCCL itself is loaded at run time")
option(DDP_BUILD_TOOLS "Build ddp_probe, which tries NCCL out, and ddp_doctor, which looks for what is wrong with a machine" ${_ddp_extras})
option(DDP_BUILD_TESTS "Build the tests" ${_ddp_extras})
option(DDP_BUILD_BENCH "Build the benchmarks" ${_ddp_extras})
option(DDP_BUILD_EXAMPLES "Build the example trainers" ${_ddp_extras})
option(DDP_BUILD_FUZZERS "Build the fuzz targets with libFuzzer (needs clang)" OFF)
option(DDP_INSTALL "Make install rules" ${_ddp_extras})
option(DDP_BOTH_KINDS "Build and install the library both static and shared, from the same objects" OFF)
option(DDP_WERROR "Treat warnings as errors" OFF)
set(DDP_SANITIZE "" CACHE STRING "Sanitizers to build with: address,undefined or thread")

foreach(_ddp_choice DDP_WITH_MPI DDP_WITH_HWLOC DDP_WITH_NVTX DDP_WITH_JPEG DDP_WITH_LIBTORCH DDP_WITH_CUDA DDP_WITH_NCCL)
  set_property(CACHE ${_ddp_choice} PROPERTY STRINGS AUTO ON OFF)
  string(TOUPPER "${${_ddp_choice}}" _ddp_value)
  if(NOT _ddp_value MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "${_ddp_choice} is \"${${_ddp_choice}}\": it may be AUTO, ON or OFF")
  endif()
  set(${_ddp_choice} ${_ddp_value})
endforeach()
if(NOT DDP_SANITIZE MATCHES "^(|address|undefined|address,undefined|thread)$")
  message(FATAL_ERROR "DDP_SANITIZE is \"${DDP_SANITIZE}\": it may be empty, address,undefined or thread")
endif()

if(DDP_BUILD_FUZZERS AND NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "DDP_BUILD_FUZZERS needs clang, which has libFuzzer: -DCMAKE_CXX_COMPILER=clang++")
endif()

# The flags of our own targets; never handed on to those who link the library.
add_library(ddp_build_flags INTERFACE)
# -ffp-contract=off: the bits of a sum may not depend on whether the target has fused multiply-add.
# nvcc takes none of it: warnings of host code in .cu files are asked for below, by name.
set(_ddp_cxx $<COMPILE_LANGUAGE:CXX>)
target_compile_options(ddp_build_flags INTERFACE "$<${_ddp_cxx}:-Wall;-Wextra;-Wpedantic;-Wshadow;-ffp-contract=off>"
                                                 $<$<AND:${_ddp_cxx},$<BOOL:${DDP_WERROR}>>:-Werror>)
target_compile_options(ddp_build_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wshadow>)
if(DDP_SANITIZE)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # g++ 12 takes the sanitizers' own code in std::regex (in Catch2) for uses of what was never set.
    target_compile_options(ddp_build_flags INTERFACE -Wno-maybe-uninitialized)
    # ThreadSanitizer does not see fences, and g++ warns of each. Those that there are, in Asio and in PeerBoard, stand between atomic accesses.
    if(DDP_SANITIZE STREQUAL "thread")
      target_compile_options(ddp_build_flags INTERFACE -Wno-tsan)
    endif()
  endif()
  target_compile_options(ddp_build_flags INTERFACE -fsanitize=${DDP_SANITIZE} -fno-omit-frame-pointer
                                                   -fno-sanitize-recover=all)
  target_link_options(ddp_build_flags INTERFACE -fsanitize=${DDP_SANITIZE})
endif()
if(DDP_BUILD_FUZZERS)
  # Tells the fuzzer which ways an input has taken, in all libraries; its main() is linked to the fuzz targets alone.
  # Object libraries hold parts of programs.
  target_compile_options(ddp_build_flags INTERFACE
                         "$<$<NOT:$<IN_LIST:$<TARGET_PROPERTY:TYPE>,EXECUTABLE;OBJECT_LIBRARY>>:-fsanitize=fuzzer-no-link>")
  target_link_options(ddp_build_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()

# ddp_one_vector_target(source...): has kernels that are written with Highway compiled for one vector target instead of one after the
# other. Sanitizers mark the scope of every inlined vector operation, which for all targets takes many minutes. The program
# then needs such a processor.
function(ddp_one_vector_target)
  set(flags -fno-sanitize-address-use-after-scope)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
    list(APPEND flags -mavx2 -mfma -mf16c -mbmi -mbmi2 -mlzcnt -maes -mpclmul)
  endif()
  set_source_files_properties(${ARGN} PROPERTIES COMPILE_DEFINITIONS HWY_COMPILE_ONLY_STATIC COMPILE_OPTIONS "${flags}"
                              SKIP_PRECOMPILE_HEADERS ON)
endfunction()
