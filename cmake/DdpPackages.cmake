# SPDX-License-Identifier: Apache-2.0
# Debian packages by `cpack -G DEB`, as scripts/packages.sh calls it: libddp0.1, libddp-dev and libddp-tools. The build has to be configured
# with -DCMAKE_INSTALL_PREFIX=/usr, so that libraries are installed where Debian has them.
if(DDP_SANITIZE)
  return()
endif()
set(_soversion ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME ddp)
set(CPACK_PACKAGE_VENDOR "The libddp authors")
# Who makes the packages, as Debian's own programs take it from the environment.
set(CPACK_PACKAGE_CONTACT "The libddp authors <libddp@localhost>")
if(DEFINED ENV{DEBEMAIL})
  set(CPACK_PACKAGE_CONTACT "$ENV{DEBEMAIL}")
  if(DEFINED ENV{DEBFULLNAME})
    set(CPACK_PACKAGE_CONTACT "$ENV{DEBFULLNAME} <$ENV{DEBEMAIL}>")
  endif()
endif()
# CPack's word for none: each description begins with its own.
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${CMAKE_PROJECT_NAME} built using CMake")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_ALL runtime devel tools)
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
# Whichever MPI, CUDA or oneDNN this build has found is in the packages: dpkg-shlibdeps names their packages.
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY ">=")
set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME libddp${_soversion})
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_RECOMMENDS "libddp-tools (= ${PROJECT_VERSION}-1)")
set(CPACK_DEBIAN_RUNTIME_PACKAGE_CONTROL_EXTRA ${PROJECT_BINARY_DIR}/package/triggers)
file(WRITE ${PROJECT_BINARY_DIR}/package/triggers "activate-noawait ldconfig\n")
set(CPACK_COMPONENT_RUNTIME_DESCRIPTION "DistributedDataParallel for any C++ training program, shared library
libddp averages the gradients of the ranks of a training program while its
backward pass is still running, on CPUs and on NVIDIA GPUs.
This package has the shared library.")

set(_devel_depends "libddp${_soversion} (= ${PROJECT_VERSION}-1)" libabsl-dev libspdlog-dev libhwy-dev libssl-dev)
if(DDP_HAVE_HWLOC)
  list(APPEND _devel_depends libhwloc-dev)
endif()
if(DDP_HAVE_MPI)
  # The headers of the MPI that the static library was built with.
  set(_mpi libopenmpi-dev)
  if(MPI_CXX_LIBRARIES MATCHES "mpich")
    set(_mpi libmpich-dev)
  endif()
  list(APPEND _devel_depends ${_mpi})
endif()
list(JOIN _devel_depends ", " CPACK_DEBIAN_DEVEL_PACKAGE_DEPENDS)
set(CPACK_DEBIAN_DEVEL_PACKAGE_NAME libddp-dev)
set(CPACK_DEBIAN_DEVEL_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVEL_PACKAGE_SHLIBDEPS OFF)
set(CPACK_COMPONENT_DEVEL_DESCRIPTION "DistributedDataParallel for any C++ training program, for development
libddp averages the gradients of the ranks of a training program while its
backward pass is still running, on CPUs and on NVIDIA GPUs.
This package has the headers, the static library, the CMake package and the
pkg-config files.")

set(CPACK_DEBIAN_TOOLS_PACKAGE_NAME libddp-tools)
set(CPACK_DEBIAN_TOOLS_PACKAGE_SECTION utils)
set(CPACK_DEBIAN_TOOLS_PACKAGE_DEPENDS python3)
set(CPACK_DEBIAN_TOOLS_PACKAGE_RECOMMENDS "python3-matplotlib, openmpi-bin | mpich")
set(CPACK_COMPONENT_TOOLS_DESCRIPTION "DistributedDataParallel for any C++ training program, tools
ddp_doctor looks for what is wrong with a machine, ddp-scaling measures how
training scales over ranks. ddp_perf, train_mlp and train_cnn, which it
starts, are in /usr/libexec/ddp.")

# What the licences want in every package, and Debian: the licence and the changes. Installed for packages alone.
string(TIMESTAMP _date "%a, %d %b %Y %H:%M:%S +0000" UTC)  # of SOURCE_DATE_EPOCH, if that is set
find_program(DDP_GZIP gzip)
mark_as_advanced(DDP_GZIP)
foreach(_component runtime devel tools)
  string(TOUPPER ${_component} _upper)
  set(_package ${CPACK_DEBIAN_${_upper}_PACKAGE_NAME})
  set(_folder ${PROJECT_BINARY_DIR}/package/${_package})
  file(WRITE ${_folder}/changelog.Debian
       "ddp (${PROJECT_VERSION}-1) unstable; urgency=medium\n\n  * Version ${PROJECT_VERSION}: see CHANGELOG.md of the sources.\n\n -- ${CPACK_PACKAGE_CONTACT}  ${_date}\n")
  if(DDP_GZIP)
    execute_process(COMMAND ${DDP_GZIP} -9nf ${_folder}/changelog.Debian COMMAND_ERROR_IS_FATAL ANY)
  endif()
  install(FILES ${_folder}/changelog.Debian.gz DESTINATION share/doc/${_package} COMPONENT ${_component} EXCLUDE_FROM_ALL OPTIONAL)
  install(FILES ${PROJECT_SOURCE_DIR}/NOTICE DESTINATION share/doc/${_package} COMPONENT ${_component} EXCLUDE_FROM_ALL)
  install(FILES ${PROJECT_SOURCE_DIR}/cmake/debian_copyright DESTINATION share/doc/${_package} RENAME copyright COMPONENT ${_component}
          EXCLUDE_FROM_ALL)
endforeach()
include(CPack)
