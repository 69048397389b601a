# SPDX-License-Identifier: Apache-2.0
# Installs the library of BUILD_DIR into WORK_DIR/prefix, makes a project of README.md's two snippets (its CMakeLists.txt and its program), and one of
# docs/c.md's, builds them against the installed package of this KIND with strict warnings, and runs them alone and, given MPIEXEC, with two ranks.

include(${CMAKE_CURRENT_LIST_DIR}/readme.cmake)

file(REMOVE_RECURSE ${WORK_DIR})
foreach(component runtime devel)
  run(ignored ${CMAKE_COMMAND} --install ${BUILD_DIR} --component ${component} --prefix ${WORK_DIR}/prefix)
endforeach()
if(NOT EXISTS ${WORK_DIR}/prefix/share/doc/libddp-dev/NOTICE)
  message(FATAL_ERROR "the installation has no share/doc/libddp-dev/NOTICE")
endif()

extract(cmake ${WORK_DIR}/consumer/CMakeLists.txt)
extract(cpp ${WORK_DIR}/consumer/main.cc)
# The package's version is the headers'.
file(APPEND ${WORK_DIR}/consumer/CMakeLists.txt [[
target_compile_definitions(train PRIVATE "PACKAGE=${ddp_VERSION_MAJOR} * 10000 + ${ddp_VERSION_MINOR} * 100 + ${ddp_VERSION_PATCH}")
]])
file(APPEND ${WORK_DIR}/consumer/main.cc "static_assert(DDP_VERSION == PACKAGE);\n")
set(use_static OFF)
if(KIND STREQUAL "static")
  set(use_static ON)
endif()
set(build ${WORK_DIR}/build)
# A program that uses no GPU itself needs no CUDA toolkit, whatever libddp was built with.
run(ignored ${CMAKE_COMMAND} -S ${WORK_DIR}/consumer -B ${build} -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX}
    -DCMAKE_PREFIX_PATH=${WORK_DIR}/prefix -Dddp_USE_STATIC_LIBS=${use_static} -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON
    "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Werror")
run(ignored ${CMAKE_COMMAND} --build ${build})

# A shared library asks its users for nothing but what its headers include.
file(STRINGS ${build}/CMakeCache.txt private_packages REGEX "^(spdlog_DIR|hwy_DIR|MPI_CXX_COMPILER|HWLOC_FOUND):")
if(KIND STREQUAL "shared" AND private_packages)
  message(FATAL_ERROR "the shared package looks for what only the library needs: ${private_packages}")
elseif(KIND STREQUAL "static" AND NOT private_packages)
  message(FATAL_ERROR "the static package does not look for what the library needs")
endif()

# docs/c.md's, of the language C alone.
extract(cmake ${WORK_DIR}/c/CMakeLists.txt docs/c.md)
extract(c ${WORK_DIR}/c/main.c docs/c.md)
run(ignored ${CMAKE_COMMAND} -S ${WORK_DIR}/c -B ${build}-c -G ${GENERATOR} -DCMAKE_PREFIX_PATH=${WORK_DIR}/prefix
    -Dddp_USE_STATIC_LIBS=${use_static} -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON "-DCMAKE_C_FLAGS=-std=c99 -Wall -Wextra -Wpedantic -Wconversion -Werror")
run(ignored ${CMAKE_COMMAND} --build ${build}-c)

# A component that there is not, or both kinds at once, are refused with the reason.
file(WRITE ${WORK_DIR}/wrong/CMakeLists.txt "cmake_minimum_required(VERSION 3.20)\nproject(wrong LANGUAGES CXX)\n"
     "find_package(ddp REQUIRED COMPONENTS \${WRONG})\n")
foreach(wrong "tensor|no component tensor: there are shared, static and torch" "shared\\;static|or the static one, not both")
  string(REPLACE "|" ";" wrong "${wrong}")
  list(GET wrong 0 components)
  list(GET wrong 1 reason)
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${WORK_DIR}/wrong -B ${build}-wrong -G ${GENERATOR} "-DWRONG=${components}"
                          -DCMAKE_PREFIX_PATH=${WORK_DIR}/prefix OUTPUT_QUIET ERROR_VARIABLE error RESULT_VARIABLE code)
  string(REGEX REPLACE "[ \n]+" " " error "${error}")
  if(code EQUAL 0 OR NOT error MATCHES "${reason}")
    message(FATAL_ERROR "components ${components}: ${error}")
  endif()
endforeach()

set(programs ${build}/train ${build}-c/train)

# Without CMake, from where the installation lies. Of both kinds, ddp.pc links the shared one.
find_program(PKG_CONFIG pkg-config)
if(PKG_CONFIG)
  file(GLOB_RECURSE pc ${WORK_DIR}/prefix/*/ddp.pc)
  get_filename_component(pc_folder ${pc} DIRECTORY)
  get_filename_component(libraries ${pc_folder} DIRECTORY)
  set(ENV{PKG_CONFIG_PATH} ${pc_folder})
  set(name ddp)
  if(KIND STREQUAL "static" AND EXISTS ${pc_folder}/ddp-static.pc)
    set(name ddp-static)
  endif()
  execute_process(COMMAND ${PKG_CONFIG} --cflags --libs ${name} OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  file(WRITE ${WORK_DIR}/plain.cc "#include \"ddp/ddp.h\"\n#include <cstdio>\n"
       "int main() { std::printf(\"rank 0 of %d: 0.000\\n\", (*ddp::Context::Create())->world_size()); }\n")
  run(ignored ${CXX} ${WORK_DIR}/plain.cc -o ${WORK_DIR}/plain ${flags} -Wl,-rpath,${libraries})
  list(APPEND programs ${WORK_DIR}/plain)
else()
  message(STATUS "not tried: a program built with pkg-config (apt-get install pkg-config)")
endif()

foreach(program ${programs})
  execute_process(COMMAND ldd ${program} OUTPUT_VARIABLE libraries)
  if(libraries MATCHES "libddp" AND use_static OR NOT libraries MATCHES "libddp" AND NOT use_static)
    message(FATAL_ERROR "${program}: the ${KIND} library was asked for:\n${libraries}")
  endif()
  run(alone ${program})
  expect("${alone}" "rank 0 of 1: 0\\.000")
endforeach()
if(MPIEXEC)
  set(ENV{OMPI_ALLOW_RUN_AS_ROOT} 1)
  set(ENV{OMPI_ALLOW_RUN_AS_ROOT_CONFIRM} 1)
  set(ENV{OMPI_MCA_rmaps_base_oversubscribe} 1)
  foreach(program ${build}/train ${build}-c/train)
    run(together ${MPIEXEC} -n 2 ${program})
    expect("${together}" "rank 0 of 2: 0\\.500")
    expect("${together}" "rank 1 of 2: 0\\.500")
  endforeach()
endif()
file(REMOVE_RECURSE ${WORK_DIR})
