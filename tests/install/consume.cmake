# Installs COMPONENT of BUILD_DIR into WORK_DIR/prefix, makes a project of README.md's two snippets (its CMakeLists.txt and its program), builds
# it against the installed package, and runs it alone and, given MPIEXEC, with two ranks.

function(run output)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE text ERROR_VARIABLE text TIMEOUT 240)
  if(NOT result EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nended with ${result}:\n${text}")
  endif()
  set(${output} "${text}" PARENT_SCOPE)
endfunction()

# The first fenced block of LANGUAGE in README.md, to FILE.
function(extract language file)
  file(READ ${SOURCE_DIR}/README.md text)
  string(FIND "${text}" "```${language}\n" begin)
  if(begin EQUAL -1)
    message(FATAL_ERROR "README.md has no ```${language} block")
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

file(REMOVE_RECURSE ${WORK_DIR})
run(ignored ${CMAKE_COMMAND} --install ${BUILD_DIR} --component ${COMPONENT} --prefix ${WORK_DIR}/prefix)

extract(cmake ${WORK_DIR}/consumer/CMakeLists.txt)
extract(cpp ${WORK_DIR}/consumer/main.cc)
set(build ${WORK_DIR}/build)
run(ignored ${CMAKE_COMMAND} -S ${WORK_DIR}/consumer -B ${build} -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${CXX}
    -DCMAKE_PREFIX_PATH=${WORK_DIR}/prefix)
run(ignored ${CMAKE_COMMAND} --build ${build})

# A shared library asks its users for nothing but what its headers include.
file(STRINGS ${build}/CMakeCache.txt private_packages REGEX "^(spdlog_DIR|hwy_DIR|MPI_CXX_COMPILER|HWLOC_FOUND):")
if(KIND STREQUAL "shared" AND private_packages)
  message(FATAL_ERROR "the shared package looks for what only the library needs: ${private_packages}")
elseif(KIND STREQUAL "static" AND NOT private_packages)
  message(FATAL_ERROR "the static package does not look for what the library needs")
endif()

run(alone ${build}/train)
expect("${alone}" "rank 0 of 1: 0\\.000")
if(MPIEXEC)
  set(ENV{OMPI_ALLOW_RUN_AS_ROOT} 1)
  set(ENV{OMPI_ALLOW_RUN_AS_ROOT_CONFIRM} 1)
  set(ENV{OMPI_MCA_rmaps_base_oversubscribe} 1)
  run(together ${MPIEXEC} -n 2 ${build}/train)
  expect("${together}" "rank 0 of 2: 0\\.500")
  expect("${together}" "rank 1 of 2: 0\\.500")
endif()
file(REMOVE_RECURSE ${WORK_DIR})
