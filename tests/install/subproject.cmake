# SPDX-License-Identifier: Apache-2.0
# Configures a project that has libddp as a part of it, with a standard and flags of its own, and checks that libddp follows it and changes
# nothing of it. With LTO=ON also builds README.md's program in that project with link-time optimisation, which sees all types that files define
# differently, and runs it.
include(${CMAKE_CURRENT_LIST_DIR}/readme.cmake)

file(REMOVE_RECURSE ${WORK_DIR})
extract(cpp ${WORK_DIR}/main.cc)
file(WRITE ${WORK_DIR}/CMakeLists.txt [[
cmake_minimum_required(VERSION 3.22)
project(parent LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 23)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# What CMake and projects steer builds by. Names that a parent does not know stay out of its way by their prefix.
function(read_variables out)
  get_cmake_property(names VARIABLES)
  list(FILTER names INCLUDE REGEX "^(CMAKE_|BUILD_)")
  list(FILTER names EXCLUDE REGEX "^CMAKE_(MATCH_|CURRENT_FUNCTION|HAVE_LIBC_|THREAD|PROJECT_VERSION)")
  set(text "")
  foreach(name IN LISTS names)
    string(APPEND text "${name}=${${name}}\n")
  endforeach()
  foreach(property COMPILE_OPTIONS COMPILE_DEFINITIONS INCLUDE_DIRECTORIES LINK_OPTIONS)
    get_directory_property(value ${property})
    string(APPEND text "${property}=${value}\n")
  endforeach()
  set(${out} "${text}" PARENT_SCOPE)
endfunction()

read_variables(before)
add_subdirectory(${LIBDDP} libddp)
read_variables(after)
file(WRITE ${CMAKE_BINARY_DIR}/before.txt "${before}")
file(WRITE ${CMAKE_BINARY_DIR}/after.txt "${after}")
if(NOT before STREQUAL after)
  message(FATAL_ERROR "libddp has changed variables of its parent: compare before.txt and after.txt in ${CMAKE_BINARY_DIR}")
endif()

add_executable(train main.cc)
target_link_libraries(train PRIVATE ddp::ddp)
]])

set(build ${WORK_DIR}/build)
set(arguments -DDDP_WITH_HWLOC=OFF -DDDP_WITH_NVTX=OFF)
if(LTO)
  # Into a shared library go all files.
  set(arguments -DCMAKE_INTERPROCEDURAL_OPTIMIZATION=ON -DBUILD_SHARED_LIBS=ON "-DCMAKE_CXX_FLAGS=-g0 -Werror=odr -Werror=lto-type-mismatch")
endif()
run(ignored ${CMAKE_COMMAND} -S ${WORK_DIR} -B ${build} -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX} -DLIBDDP=${SOURCE_DIR}
    -DDDP_WITH_CUDA=OFF ${arguments})

file(STRINGS ${build}/compile_commands.json command REGEX "\"command\".*libddp/comm/host/engine.cc")
expect("${command}" "-std=[a-z]+\\+\\+(23|2b) ")
foreach(flag " -O[0-9]" " -DNDEBUG" " -Werror ")
  if(command MATCHES "${flag}")
    message(FATAL_ERROR "libddp is compiled with${flag}, which its parent has not asked for:\n${command}")
  endif()
endforeach()

if(NOT LTO)
  file(STRINGS ${build}/compile_commands.json optional REGEX "\"file\".*(hwloc|topology|nvtx)")
  expect("${optional}" "launch/no_hwloc.cc.*observe/no_nvtx.cc")
else()
  run(ignored ${CMAKE_COMMAND} --build ${build})
  run(alone ${build}/train)
  expect("${alone}" "rank 0 of 1: 0\\.000")
endif()
