# SPDX-License-Identifier: Apache-2.0
# Compiles every header of include/ddp alone, and then strict.cc, with strict warnings as errors: by CXX, and where it is installed by clang.
# Only the compiler's front end runs.
cmake_minimum_required(VERSION 3.22)
set(INCLUDE_DIR ${SOURCE_DIR}/include)
set(STRICT ${CMAKE_CURRENT_LIST_DIR}/strict.cc)
set(flags -std=c++20 -fsyntax-only -x c++ -I${INCLUDE_DIR} -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Wold-style-cast
          -Wcast-qual -Wnon-virtual-dtor -Woverloaded-virtual -Wdouble-promotion -Wformat=2 -Wmissing-field-initializers -Wunused -Werror)

function(compile compiler file)
  execute_process(COMMAND ${compiler} ${flags} ${file} RESULT_VARIABLE result ERROR_VARIABLE errors)
  if(NOT result EQUAL 0)
    message(SEND_ERROR "${compiler} on ${file}:\n${errors}")
  endif()
endfunction()

file(MAKE_DIRECTORY ${WORK_DIR})
file(GLOB headers RELATIVE ${INCLUDE_DIR} ${INCLUDE_DIR}/ddp/*.h ${INCLUDE_DIR}/ddp/c/*.h)
list(REMOVE_ITEM headers ddp/torch.h) # needs LibTorch
if(NOT headers)
  message(FATAL_ERROR "no headers in ${INCLUDE_DIR}/ddp")
endif()
set(all "")
foreach(header IN LISTS headers)
  string(MAKE_C_IDENTIFIER ${header} name)
  file(WRITE ${WORK_DIR}/${name}.cc "#include \"${header}\"\n")
  compile(${CXX} ${WORK_DIR}/${name}.cc)
  string(APPEND all "#include \"${header}\"\n")
endforeach()
compile(${CXX} ${STRICT})

# Together is enough for the second compiler: alone they have compiled already.
find_program(clang NAMES clang++ clang++-14 clang++-18)
if(clang)
  file(WRITE ${WORK_DIR}/all_headers.cc "${all}")
  compile(${clang} ${WORK_DIR}/all_headers.cc)
  compile(${clang} ${STRICT})
endif()
