# SPDX-License-Identifier: Apache-2.0
# How tests are declared: ddp_add_unit_test for one process, ddp_add_distributed_test for several ranks.
#
# ddp_add_fuzzer for a reader of untrusted input.
#
# Labels: unit, distributed, fault, fuzz, install, gpu, slow (scripts/test.sh leaves these out unless it is told a label).
#
# Tests share the processors. One ctest slot is half a processor, and a test of K busy ranks takes 2 K slots, at most those
# of all processors. One that mostly waits takes one. scripts/test.sh gives four slots more than the processors have, so
# that tests which wait run beside busy ones, and cost no time of their own.
include_guard(GLOBAL)

cmake_host_system_information(RESULT _ddp_processors QUERY NUMBER_OF_LOGICAL_CORES)

# ddp_slots(out busy): sets `out` to the slots of a test that keeps so many processors busy.
function(ddp_slots out busy)
  math(EXPR slots "2 * ${busy}")
  math(EXPR most "2 * ${_ddp_processors}")
  if(slots GREATER most)
    set(slots ${most})
  endif()
  set(${out} ${slots} PARENT_SCOPE)
endfunction()

# ddp_tests_wait(test...): these tests mostly wait, for time-outs or for programs to start and end. They begin early.
function(ddp_tests_wait)
  foreach(test IN LISTS ARGN)
    if(TEST ${test})
      set_tests_properties(${test} PROPERTIES PROCESSORS 1 COST 50)
    endif()
  endforeach()
endfunction()

set(DDP_TEST_ENVIRONMENT "UBSAN_OPTIONS=print_stacktrace=1" "TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1"
                         "DDP_LOG_LEVEL=error" "DDP_STAGED_LIMITS=fixed")
# Seconds: several times what a test takes under a sanitizer on a busy machine. A hang costs as much.
set(DDP_TEST_TIMEOUT 400)

# Ranks under mpirun: with an Open MPI only, whose variables libddp reads, and not under ThreadSanitizer, which cannot see across processes.
set(DDP_TEST_MPIRUN OFF)
if(DDP_HAVE_MPI AND NOT DDP_SANITIZE STREQUAL "thread")
  execute_process(COMMAND ${MPIEXEC_EXECUTABLE} --version OUTPUT_VARIABLE _ddp_mpiexec_version ERROR_QUIET)
  if(_ddp_mpiexec_version MATCHES "Open MPI|OpenRTE|Open Run-Time")
    set(DDP_TEST_MPIRUN ON)
  else()
    message(STATUS "${MPIEXEC_EXECUTABLE} is not Open MPI's: distributed tests run on threads only")
  endif()
endif()

# Keeps the sources that exist already, so that a test can be declared before it is written. Relative to the caller's folder.
function(_ddp_existing_sources out)
  set(found)
  foreach(source IN LISTS ARGN)
    get_filename_component(path ${source} ABSOLUTE)
    if(EXISTS ${path})
      list(APPEND found ${path})
    endif()
  endforeach()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

# Test code is compiled often: -O1 takes a twentieth longer than -O0, and tests that loop over elements take half (ddp_gpu_test) to nine tenths
# (contract_test) of the time. What they test is optimized in full, and so are the helpers in tests/support.
set(DDP_TEST_CODE_OPTIONS $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:RelWithDebInfo>>:-O1>)

# A test program. Public and internal headers and every symbol of libddp can be used.
function(_ddp_test_executable target main sources libs)
  add_executable(${target} ${sources})
  target_link_libraries(${target} PRIVATE ${main} ${libs})
  set_target_properties(${target} PROPERTIES UNITY_BUILD OFF)  # files of one test may have helpers of the same name
  target_compile_options(${target} PRIVATE ${DDP_TEST_CODE_OPTIONS})
  # What has flags of its own reads its headers itself.
  if(NOT "${libs}" MATCHES "torch")
    target_precompile_headers(${target} REUSE_FROM ddp_test_headers)
  endif()
endfunction()

# ddp_add_test_cases(target source...): test cases that are compiled once for several programs, which name the target among their LIBS.
function(ddp_add_test_cases target)
  add_library(${target} OBJECT ${ARGN})
  target_link_libraries(${target} PRIVATE ddp_test_base)
  # The flags of a program, so that it can share the programs' precompiled headers.
  set_target_properties(${target} PROPERTIES UNITY_BUILD OFF POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${target} PRIVATE -fPIE ${DDP_TEST_CODE_OPTIONS})
  target_precompile_headers(${target} REUSE_FROM ddp_test_headers)
endfunction()

# ddp_add_unit_test(name source... [LIBS library...] [ARGS argument...] [LABELS label...])
#
# Builds bin/<name>_test from Catch2 test cases and runs it as the test unit.<name>. Nothing is done while the first source does not exist.
function(ddp_add_unit_test name)
  cmake_parse_arguments(arg "" "" "LIBS;ARGS;LABELS" ${ARGN})
  _ddp_existing_sources(sources ${arg_UNPARSED_ARGUMENTS})
  if(NOT sources)
    return()
  endif()
  _ddp_test_executable(${name}_test ddp_test_main "${sources}" "${arg_LIBS}")
  add_test(NAME unit.${name} COMMAND ${name}_test ${arg_ARGS})
  ddp_slots(slots 1)
  set_tests_properties(unit.${name} PROPERTIES LABELS "unit;${arg_LABELS}" TIMEOUT ${DDP_TEST_TIMEOUT} PROCESSORS ${slots}
                                               ENVIRONMENT "${DDP_TEST_ENVIRONMENT}")
endfunction()

# ddp_add_c_test_executable(target source...): a test program in C99. Not instrumented: a C compiler of another maker may not have the same
# sanitizers.
function(ddp_add_c_test_executable target)
  add_executable(${target} ${ARGN})
  set_target_properties(${target} PROPERTIES C_STANDARD 99 C_EXTENSIONS OFF LINKER_LANGUAGE CXX)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Werror)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${target} PRIVATE ddp m)
  target_link_options(${target} PRIVATE $<TARGET_PROPERTY:ddp_build_flags,INTERFACE_LINK_OPTIONS>)
endfunction()

# ddp_add_gpu_test(name SOURCES source... [LIBS library...])
#
# As ddp_add_unit_test, as the test gpu.<name>: skipped where there is no GPU.
function(ddp_add_gpu_test name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBS" ${ARGN})
  _ddp_test_executable(gpu_${name}_test ddp_test_main "${arg_SOURCES}" "CUDA::cudart_static;${arg_LIBS}")
  add_test(NAME gpu.${name} COMMAND gpu_${name}_test)
  _ddp_gpu_test_properties(gpu.${name} 1)
endfunction()

# ddp_add_gpu_ranks_test(name SOURCES source... [LIBS library...] [GPUS 1 2 4])
#
# As ddp_add_distributed_test, with one GPU a rank: gpu.<name>.t<K> on threads, gpu.<name>.n<K> under mpirun. Skipped
# where there are fewer GPUs.
function(ddp_add_gpu_ranks_test name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBS;GPUS" ${ARGN})
  _ddp_test_executable(gpu_${name}_test ddp_test_ranks_main "${arg_SOURCES}" "CUDA::cudart_static;${arg_LIBS}")
  foreach(ranks IN LISTS arg_GPUS)
    add_test(NAME gpu.${name}.t${ranks} COMMAND gpu_${name}_test)
    _ddp_gpu_test_properties(gpu.${name}.t${ranks} ${ranks} DDP_TEST_RANKS=${ranks})
    ddp_add_gpu_mpirun_test(${name} ${ranks})
  endforeach()
endfunction()

# Registers gpu_<name>_test under mpirun, with one GPU a rank, as gpu.<name>.n<K>.
function(ddp_add_gpu_mpirun_test name ranks)
  if(DDP_TEST_MPIRUN)
    add_test(NAME gpu.${name}.n${ranks}
             COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks} --oversubscribe --bind-to none --timeout 250
                     $<TARGET_FILE:gpu_${name}_test>)
    _ddp_gpu_test_properties(gpu.${name}.n${ranks} ${ranks} OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1)
  endif()
endfunction()

function(_ddp_gpu_test_properties test gpus)
  set_tests_properties(
    ${test} PROPERTIES LABELS gpu TIMEOUT 300 RESOURCE_LOCK gpu SKIP_REGULAR_EXPRESSION "SKIPPED: "
                       ENVIRONMENT "${DDP_TEST_ENVIRONMENT};DDP_TEST_GPUS=${gpus};DDP_TIMEOUT=60;${ARGN}")
endfunction()

# Registers `command...` run by mpirun on so many ranks, as the test <test>.
function(ddp_add_mpirun_test test ranks timeout labels)
  math(EXPR patience "${timeout} + 10")  # mpirun ends its ranks itself; killing mpirun could leave them behind
  ddp_slots(slots ${ranks})
  add_test(NAME ${test} COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks} --oversubscribe --bind-to none
                                --timeout ${timeout} ${ARGN})
  set_tests_properties(
    ${test} PROPERTIES LABELS "${labels}" TIMEOUT ${patience} PROCESSORS ${slots}
    ENVIRONMENT "${DDP_TEST_ENVIRONMENT};OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;ASAN_OPTIONS=detect_leaks=0;\
OMPI_MCA_btl_vader_single_copy_mechanism=none;DDP_TIMEOUT=60")
endfunction()

# The numbers of ranks that a test runs at unless it says otherwise. The contract suite proves each backend at every
# number, on threads and on processes; what is built on top of it then runs at each number once. Sanitizers look for
# errors of memory and races, for which one number each does.
set(DDP_TEST_THREADS 1 3)
set(DDP_TEST_PROCESSES 2 4)
if(DDP_SANITIZE)
  set(DDP_TEST_THREADS 3)
  set(DDP_TEST_PROCESSES 2)
endif()

# ddp_add_distributed_test(NAME name SOURCES source... | TARGET target [THREADS K...] [PROCESSES K...] [LIBS library...] [ARGS argument...]
#                          [LABELS label...] [TIMEOUT seconds] [NODE_SIZE ranks] [SLEEPS])
#
# Builds bin/<name>_test from test cases made with tests/support/ranks.h, or takes a program that is built already, and runs it as <name>.tK
# with K ranks as threads of one process, and as <name>.nK with K processes under mpirun. Without THREADS and PROCESSES, at
# DDP_TEST_THREADS and DDP_TEST_PROCESSES; with one of them, at those only. The processes are left out where there is no
# Open MPI, and under ThreadSanitizer. ARGS go to Catch2: "[slow]" selects. NODE_SIZE cuts the ranks into nodes of so many,
# which under mpirun talk over TCP. SLEEPS: the ranks wait for time-outs most of the time.
function(ddp_add_distributed_test)
  cmake_parse_arguments(arg "SLEEPS" "NAME;TARGET;TIMEOUT;NODE_SIZE" "SOURCES;THREADS;PROCESSES;LIBS;ARGS;LABELS" ${ARGN})
  if(NOT arg_TARGET)
    _ddp_existing_sources(sources ${arg_SOURCES})
    if(NOT sources)
      return()
    endif()
    set(arg_TARGET ${arg_NAME}_test)
    _ddp_test_executable(${arg_TARGET} ddp_test_ranks_main "${sources}" "${arg_LIBS}")
  elseif(NOT TARGET ${arg_TARGET})
    return()
  endif()
  if(NOT arg_THREADS AND NOT arg_PROCESSES)
    set(arg_THREADS ${DDP_TEST_THREADS})
    set(arg_PROCESSES ${DDP_TEST_PROCESSES})
    if(NOT DDP_TEST_MPIRUN AND NOT DDP_SANITIZE)
      list(APPEND arg_THREADS ${DDP_TEST_PROCESSES})
    endif()
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT ${DDP_TEST_TIMEOUT})
  endif()

  set(nodes)
  set(wire)
  if(arg_NODE_SIZE)
    set(nodes DDP_NODE_SIZE=${arg_NODE_SIZE})
    set(wire --mca btl tcp,self --mca btl_tcp_if_include lo)
  endif()

  set(tests)
  foreach(ranks IN LISTS arg_THREADS)
    set(test ${arg_NAME}.t${ranks})
    list(APPEND tests ${test})
    ddp_slots(slots ${ranks})
    add_test(NAME ${test} COMMAND ${arg_TARGET} ${arg_ARGS})
    set_tests_properties(
      ${test} PROPERTIES LABELS "distributed;${arg_LABELS}" TIMEOUT ${arg_TIMEOUT} PROCESSORS ${slots}
      ENVIRONMENT "${DDP_TEST_ENVIRONMENT};DDP_TEST_RANKS=${ranks};DDP_TIMEOUT=60")
  endforeach()
  foreach(ranks IN LISTS arg_PROCESSES)
    if(DDP_TEST_MPIRUN)
      set(test ${arg_NAME}.n${ranks})
      list(APPEND tests ${test})
      ddp_add_mpirun_test(${test} ${ranks} ${arg_TIMEOUT} "distributed;${arg_LABELS}" ${wire} $<TARGET_FILE:${arg_TARGET}>
                          ${arg_ARGS})
    endif()
  endforeach()
  if(nodes)
    set_property(TEST ${tests} APPEND PROPERTY ENVIRONMENT ${nodes})
  endif()
  if(arg_SLEEPS)
    ddp_tests_wait(${tests})
  endif()
endfunction()

# ddp_add_fuzzer(name source [LIBS library...])
#
# Builds bin/<name>_fuzz from a source that defines LLVMFuzzerTestOneInput, and runs it as the test fuzz.<name>. With DDP_BUILD_FUZZERS a fuzzer
# makes inputs up for DDP_FUZZ_SECONDS, beginning with those in corpus/<name> beside the source; what it finds is put into fuzz/<name> of the
# build folder: new inputs, and those that fail (crash-*), which belong into the corpus once they are mended. In other builds the test runs what
# is in the corpus. Every public and internal function of libddp can be called.
set(DDP_FUZZ_SECONDS 20 CACHE STRING "How long each fuzz target runs as a test")
function(ddp_add_fuzzer name source)
  cmake_parse_arguments(arg "" "" "LIBS" ${ARGN})
  set(corpus ${CMAKE_CURRENT_SOURCE_DIR}/corpus/${name})
  add_executable(${name}_fuzz ${source})
  target_link_libraries(${name}_fuzz PRIVATE ddp_internals ddp_build_flags ${arg_LIBS})
  if(DDP_BUILD_FUZZERS)
    set(found ${PROJECT_BINARY_DIR}/fuzz/${name})
    file(MAKE_DIRECTORY ${found})
    target_link_options(${name}_fuzz PRIVATE -fsanitize=fuzzer)
    add_test(NAME fuzz.${name} COMMAND ${name}_fuzz -max_total_time=${DDP_FUZZ_SECONDS} -timeout=10 -rss_limit_mb=2048
                                       -artifact_prefix=${found}/ -print_final_stats=1 ${found} ${corpus})
  else()
    target_sources(${name}_fuzz PRIVATE ${PROJECT_SOURCE_DIR}/tests/fuzz/replay_main.cc)
    add_test(NAME fuzz.${name} COMMAND ${name}_fuzz ${corpus})
  endif()
  math(EXPR timeout "${DDP_TEST_TIMEOUT} + ${DDP_FUZZ_SECONDS}")
  ddp_slots(slots 1)
  set_tests_properties(fuzz.${name} PROPERTIES LABELS fuzz TIMEOUT ${timeout} PROCESSORS ${slots} ENVIRONMENT "${DDP_TEST_ENVIRONMENT}")
endfunction()
