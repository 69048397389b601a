# SPDX-License-Identifier: Apache-2.0
# Run at build time: cmake -DSOURCE=FOLDER -DHEADER=FILE -P WriteRevision.cmake. Writes the revision of the sources to a
# header, which changes only if the revision does. Outside a Git repository the revision is empty.
set(_revision)
find_program(_git git)
if(_git AND EXISTS ${SOURCE}/.git)
  execute_process(COMMAND ${_git} -C ${SOURCE} rev-parse --short=12 HEAD OUTPUT_VARIABLE _revision ERROR_QUIET
                  OUTPUT_STRIP_TRAILING_WHITESPACE)
  execute_process(COMMAND ${_git} -C ${SOURCE} status --porcelain --untracked-files=no OUTPUT_VARIABLE _changes ERROR_QUIET)
  if(_revision AND NOT "${_changes}" STREQUAL "")
    string(APPEND _revision " with local changes")
  endif()
endif()
set(_text "#define DDP_REVISION \"${_revision}\"\n")
set(_old)
if(EXISTS ${HEADER})
  file(READ ${HEADER} _old)
endif()
if(NOT _old STREQUAL _text)
  file(WRITE ${HEADER} "${_text}")
endif()
