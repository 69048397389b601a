# SPDX-License-Identifier: Apache-2.0
# ddp_environment: what the figures of a run, and its troubles, depend on: machine, libraries, build and GPUs. Used by the example trainers and by
# ddp_doctor.
add_library(ddp_environment STATIC ${PROJECT_SOURCE_DIR}/examples/train/environment.cc ${PROJECT_SOURCE_DIR}/examples/train/nvml.cc)
# The revision of the sources, looked up at every build; now, too, for tools that need the header but build nothing.
set(_ddp_generated ${PROJECT_BINARY_DIR}/generated)
set(_write_revision ${CMAKE_COMMAND} -DSOURCE=${PROJECT_SOURCE_DIR} -DHEADER=${_ddp_generated}/revision.h
                    -P ${PROJECT_SOURCE_DIR}/cmake/WriteRevision.cmake)
execute_process(COMMAND ${_write_revision})
add_custom_target(ddp_revision BYPRODUCTS ${_ddp_generated}/revision.h COMMAND ${_write_revision} COMMENT "" VERBATIM)
add_dependencies(ddp_environment ddp_revision)
target_include_directories(ddp_environment PUBLIC ${PROJECT_SOURCE_DIR} PRIVATE ${PROJECT_SOURCE_DIR}/include ${_ddp_generated})
string(TOUPPER "${CMAKE_BUILD_TYPE}" _config)
set(_cuda_toolkit)
if(DDP_HAVE_CUDA)
  set(_cuda_toolkit ${CUDAToolkit_VERSION})
endif()
target_compile_definitions(
  ddp_environment
  PRIVATE DDP_BUILD_TYPE="$<CONFIG>" DDP_COMPILER="${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}"
          DDP_COMPILER_FLAGS="${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${_config}}" DDP_SANITIZERS="${DDP_SANITIZE}"
          DDP_CUDA_TOOLKIT="${_cuda_toolkit}")
target_link_libraries(ddp_environment PUBLIC absl::statusor absl::strings
                                      PRIVATE ddp_build_flags absl::time nlohmann_json::nlohmann_json ${CMAKE_DL_LIBS})

# ddp_standard_streams: linked into every program, which then notices that its output is lost.
add_library(ddp_standard_streams OBJECT ${PROJECT_SOURCE_DIR}/tools/standard_streams.cc)
target_link_libraries(ddp_standard_streams PRIVATE ddp_build_flags)
