# Builds libddp and launch_rank.cc in WORK_DIR against MPICH, and runs it with two ranks by MPICH's mpirun, and by another MPI's if there is one.

find_program(MPICH_CXX mpicxx.mpich)
find_program(MPICH_RUN mpirun.mpich)
if(NOT MPICH_CXX OR NOT MPICH_RUN)
  message("skipped: there is no mpicxx.mpich or no mpirun.mpich (Debian and Ubuntu: mpich, libmpich-dev)")
  return()
endif()

function(run output code)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE text ERROR_VARIABLE text TIMEOUT 800)
  if((code STREQUAL "succeeds") AND NOT result EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nended with ${result}:\n${text}")
  endif()
  set(${output} "${text}" PARENT_SCOPE)
endfunction()

function(expect text)
  foreach(pattern IN LISTS ARGN)
    if(NOT text MATCHES "${pattern}")
      message(FATAL_ERROR "expected to match \"${pattern}\":\n${text}")
    endif()
  endforeach()
endfunction()

run(configured succeeds ${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/mpich -B ${WORK_DIR} -G ${GENERATOR} -DSOURCE_DIR=${SOURCE_DIR}
    -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_BUILD_TYPE=Release -DDDP_WITH_MPI=ON -DMPI_CXX_COMPILER=${MPICH_CXX})
expect("${configured}" "MPI from [^\n]*mpicxx.mpich")
run(ignored succeeds ${CMAKE_COMMAND} --build ${WORK_DIR} --target launch_rank)

run(text succeeds ${MPICH_RUN} -n 2 ${WORK_DIR}/launch_rank)
expect("${text}" "rank 0 of 2, local 0 of 2, by mpirun: sum 3" "rank 1 of 2, local 1 of 2, by mpirun: sum 3")

# The other MPI's mpirun starts two worlds of one, which is told rather than trained.
find_program(OPENMPI_RUN mpirun.openmpi)
if(OPENMPI_RUN)
  set(ENV{OMPI_ALLOW_RUN_AS_ROOT} 1)
  set(ENV{OMPI_ALLOW_RUN_AS_ROOT_CONFIRM} 1)
  run(text fails ${OPENMPI_RUN} -n 2 --oversubscribe ${WORK_DIR}/launch_rank)
  expect("${text}" "MPI says rank 0 of 1 but mpirun says rank [01] of 2; start the program with the mpirun of the MPI that libddp was built with")
endif()
