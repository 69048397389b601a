# SPDX-License-Identifier: Apache-2.0
# Builds libddp, launch_rank.cc and train_mlp in WORK_DIR against MPICH, and runs them by MPICH's mpirun, and by another MPI's if there is one.
# What is built here has to start and to meet, not to be fast: little optimisation makes the build short.

find_program(MPICH_CXX mpicxx.mpich)
find_program(MPICH_RUN mpirun.mpich)
if(NOT MPICH_CXX OR NOT MPICH_RUN)
  message("skipped: there is no mpicxx.mpich or no mpirun.mpich (Debian and Ubuntu: mpich, libmpich-dev)")
  return()
endif()

function(run output code)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE text ERROR_VARIABLE text TIMEOUT 800)
  list(JOIN ARGN " " command)
  if((code STREQUAL "succeeds") AND NOT result EQUAL 0)
    message(FATAL_ERROR "${command}\nended with ${result}:\n${text}")
  elseif((code STREQUAL "fails") AND result EQUAL 0)
    message(FATAL_ERROR "${command}\nsucceeded:\n${text}")
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
    -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER} -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O1
    -DDDP_WITH_MPI=ON -DMPI_CXX_COMPILER=${MPICH_CXX} -DDDP_WITH_CUDA=OFF -DDDP_WITH_LIBTORCH=OFF -DDDP_BUILD_EXAMPLES=${EXAMPLES})
expect("${configured}" "MPI from [^\n]*mpicxx.mpich")
run(ignored succeeds ${CMAKE_COMMAND} --build ${WORK_DIR} --target launch_rank)

set(ENV{DDP_TIMEOUT} 60)
run(text succeeds ${MPICH_RUN} -n 2 ${WORK_DIR}/launch_rank)
expect("${text}" "rank 0 of 2, local 0 of 2, by mpirun: sum 3" "rank 1 of 2, local 1 of 2, by mpirun: sum 3")

# Nodes, whose ranks send each other messages: other functions of MPI.
set(ENV{DDP_NODE_SIZE} 1)
run(text succeeds ${MPICH_RUN} -n 3 ${WORK_DIR}/launch_rank)
expect("${text}" "rank 0 of 3, local 0 of 3, by mpirun: sum 6" "rank 2 of 3, local 2 of 3, by mpirun: sum 6")
unset(ENV{DDP_NODE_SIZE})

# As under srun --mpi=pmi2: Slurm's variables, and PMI, which is mpirun's here. What Slurm says are two nodes can meet by MPI alone.
set(step "unset MPI_LOCALRANKID MPI_LOCALNRANKS && SLURM_PROCID=$PMI_RANK SLURM_NODEID=$PMI_RANK SLURM_LOCALID=0 SLURM_NTASKS=2 \
SLURM_STEP_ID=0 SLURM_STEP_TASKS_PER_NODE='1(x2)' exec \"$0\"")
run(text succeeds ${MPICH_RUN} -n 2 sh -c ${step} ${WORK_DIR}/launch_rank)
expect("${text}" "rank 0 of 2, local 0 of 1, by srun: sum 3" "rank 1 of 2, local 0 of 1, by srun: sum 3")

# The other MPI's mpirun starts two worlds of one, which is told rather than trained.
find_program(OPENMPI_RUN mpirun.openmpi)
if(OPENMPI_RUN)
  set(ENV{OMPI_ALLOW_RUN_AS_ROOT} 1)
  set(ENV{OMPI_ALLOW_RUN_AS_ROOT_CONFIRM} 1)
  run(text fails ${OPENMPI_RUN} -n 2 --oversubscribe ${WORK_DIR}/launch_rank)
  expect("${text}" "MPI says rank 0 of 1 but mpirun says rank [01] of 2; start the program with the mpirun of the MPI that libddp was built with")
endif()

# A training.
if(EXAMPLES)
  run(ignored succeeds ${CMAKE_COMMAND} --build ${WORK_DIR} --target train_mlp)
  run(text succeeds ${MPICH_RUN} -n 2 ${WORK_DIR}/ddp/examples/train_mlp --epochs=6 --hidden=128,64 --batch=32)
  expect("${text}" "2 ranks started by mpirun" "test accuracy 9[5-9]")
endif()
