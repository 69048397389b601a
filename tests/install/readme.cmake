# SPDX-License-Identifier: Apache-2.0
# Shared by the scripts of this folder: runs programs, takes pages apart.

cmake_minimum_required(VERSION 3.22)

function(run output)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE text ERROR_VARIABLE text TIMEOUT 1500)
  if(NOT result EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nended with ${result}:\n${text}")
  endif()
  set(${output} "${text}" PARENT_SCOPE)
endfunction()

# The first fenced block of LANGUAGE in a page, README.md unless named, to FILE.
function(extract language file)
  set(page README.md)
  if(ARGN)
    set(page ${ARGN})
  endif()
  file(READ ${SOURCE_DIR}/${page} text)
  string(FIND "${text}" "```${language}\n" begin)
  if(begin EQUAL -1)
    message(FATAL_ERROR "${page} has no ```${language} block")
  endif()
  string(LENGTH "```${language}\n" fence)
  math(EXPR begin "${begin} + ${fence}")
  string(SUBSTRING "${text}" ${begin} -1 text)
  string(FIND "${text}" "```" end)
  string(SUBSTRING "${text}" 0 ${end} text)
  file(WRITE ${file} "${text}")
endfunction()

function(expect text pattern)
  if(NOT text MATCHES "${pattern}")
    message(FATAL_ERROR "expected to match \"${pattern}\":\n${text}")
  endif()
endfunction()
