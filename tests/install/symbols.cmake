# Reads the symbols of the SHARED and the STATIC library with NM. The shared library exports what include/ddp declares, and nothing of the
# libraries that it is made of: a program with another version of one of these would share its functions. The static library defines strong
# symbols in its own namespace alone, and nothing at all of Asio, whose names are the same in every version.

cmake_minimum_required(VERSION 3.22)

function(symbols output)
  execute_process(COMMAND ${NM} -C --defined-only ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE text ERROR_VARIABLE errors)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${NM} ${ARGN}: ${errors}")
  endif()
  string(REGEX REPLACE "[][;]" "_" text "${text}")  # which would end or join the elements of a list
  string(REGEX MATCHALL "[0-9a-f]+ [A-Za-z] [^\n]+" lines "${text}")
  if(NOT lines MATCHES "ddp::Context::Create")
    message(FATAL_ERROR "no symbols read from ${ARGN}")
  endif()
  set(${output} "${lines}" PARENT_SCOPE)
endfunction()

function(expect_none what)
  if(ARGN)
    list(LENGTH ARGN count)
    list(JOIN ARGN "\n  " list)
    message(SEND_ERROR "${what}: ${count} symbols\n  ${list}")
  endif()
endfunction()

symbols(exported -D ${SHARED})
set(foreign ${exported})
list(FILTER foreign EXCLUDE REGEX "^[0-9a-f]+ [A-Za-z] ((typeinfo|typeinfo name|vtable|VTT) for )?ddp::")
expect_none("exported by the shared library, though not in namespace ddp" ${foreign})
set(inner ${exported})
list(FILTER inner INCLUDE REGEX "ddp::(cuda|nccl)::")
expect_none("exported by the shared library, though not part of the public interface" ${inner})

symbols(defined ${STATIC})
set(asio ${defined})
list(FILTER asio INCLUDE REGEX "[ (<,*&]asio(::|_)")
expect_none("of Asio in the static library" ${asio})
set(strong ${defined})
list(FILTER strong INCLUDE REGEX "^[0-9a-f]+ [TDBRG] ")
list(FILTER strong EXCLUDE REGEX "^[0-9a-f]+ [TDBRG] ([^(]+ )?(ddp::|__device_stub__ZN3ddp)")
expect_none("strong in the static library, though not in namespace ddp" ${strong})
