# SPDX-License-Identifier: Apache-2.0
# Installing the library so that `find_package(ddp)` and pkg-config work for other projects. Components: runtime (the shared library), devel
# (headers, the static library, the packages), tools (programs) and doc (licences).
include(CMakePackageConfigHelpers)

# Sets VARIABLE to what TARGET, a library, is: static or shared.
function(ddp_kind target variable)
  get_target_property(type ${target} TYPE)
  set(${variable} static PARENT_SCOPE)
  if(type STREQUAL "SHARED_LIBRARY")
    set(${variable} shared PARENT_SCOPE)
  endif()
endfunction()

# ddp_add_other_kind(): adds ddp_other_kind, the kind of library, static or shared, that ddp is not, from the same objects. Both have the names
# ddp_static and ddp_shared.
function(ddp_add_other_kind)
  ddp_kind(ddp kind)
  set(other shared)
  if(kind STREQUAL "shared")
    set(other static)
  endif()
  get_target_property(public ddp INTERFACE_LINK_LIBRARIES)
  list(FILTER public EXCLUDE REGEX LINK_ONLY)
  get_target_property(private ddp LINK_LIBRARIES)
  list(REMOVE_ITEM private ${public})
  string(TOUPPER ${other} other_type)
  add_library(ddp_other_kind ${other_type} $<TARGET_OBJECTS:ddp>)
  target_link_libraries(ddp_other_kind PUBLIC ${public} PRIVATE ${private})
  target_compile_features(ddp_other_kind PUBLIC cxx_std_20)
  set_target_properties(ddp_other_kind PROPERTIES LINKER_LANGUAGE CXX)
  get_target_property(link_options ddp LINK_OPTIONS)
  if(link_options)
    target_link_options(ddp_other_kind PRIVATE ${link_options})
  endif()
  target_include_directories(ddp_other_kind PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                                   $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  add_library(ddp_${kind} ALIAS ddp)
  add_library(ddp_${other} ALIAS ddp_other_kind)
endfunction()

# Installs TARGET, a library, as ddp::ddp_static or ddp::ddp_shared.
function(ddp_install_kind target)
  ddp_kind(${target} kind)
  # Before 1.0 a minor version may change the binary interface.
  set_target_properties(${target} PROPERTIES EXPORT_NAME ddp_${kind} OUTPUT_NAME ddp VERSION ${PROJECT_VERSION}
                                             SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  install(TARGETS ${target} EXPORT ddp_${kind}Targets
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT devel
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime NAMELINK_COMPONENT devel
          INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT ddp_${kind}Targets NAMESPACE ddp:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/ddp COMPONENT devel)
  # The CUDA runtime goes along with a static library, so that its users need no CUDA toolkit; its licence allows that.
  if(kind STREQUAL "static" AND DDP_HAVE_CUDA)
    install(FILES $<TARGET_FILE:CUDA::cudart_static> DESTINATION ${CMAKE_INSTALL_LIBDIR}/ddp COMPONENT devel)
  endif()
endfunction()

# Of the KINDS of the library that are installed, ddp.pc links the shared one, else the static one, and ddp-static.pc the static one, with all
# that it was built with.
function(ddp_install_pkg_config)
  set(kinds ${ARGN})
  set(prefix ${CMAKE_INSTALL_PREFIX})
  if(NOT IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}" AND NOT IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
    file(RELATIVE_PATH up /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)  # works where the installation is moved
    string(REGEX REPLACE "/$" "" prefix "\${pcfiledir}/${up}")
  endif()
  set(private "spdlog libcrypto libhwy absl_function_ref")
  set(libs_private "")
  if(DDP_HAVE_HWLOC)
    set(libs_private "-lhwloc")  # its own package asks for libraries that Debian does not install with it
  endif()
  if(DDP_HAVE_MPI)
    list(TRANSFORM MPI_CXX_LIBRARIES REPLACE "^-l(.*)" "\\1" OUTPUT_VARIABLE libraries)
    list(JOIN libraries " " libraries)
    string(APPEND libs_private " ${libraries}")
  endif()
  if(DDP_HAVE_CUDA)
    string(APPEND libs_private " \${libdir}/ddp/libcudart_static.a -ldl -lrt")
  endif()
  set(names ddp)
  if(static IN_LIST kinds)
    list(APPEND names ddp-static)
  endif()
  foreach(name ${names})
    set(DDP_PC_NAME ${name})
    set(DDP_PC_PREFIX ${prefix})
    set(DDP_PC_REQUIRES "absl_status absl_statusor absl_strings absl_span absl_time")
    set(DDP_PC_PRIVATE "")
    set(DDP_PC_LIBS "-L\${libdir} -lddp")
    if(name STREQUAL "ddp" AND shared IN_LIST kinds)
      if(static IN_LIST kinds)  # pkg-config --static
        set(DDP_PC_PRIVATE "Requires.private: ${private}\nLibs.private: ${libs_private}\n")
      endif()
    else()
      string(APPEND DDP_PC_REQUIRES " ${private}")
      set(DDP_PC_LIBS "\${libdir}/libddp.a ${libs_private}")
    endif()
    configure_file(${PROJECT_SOURCE_DIR}/cmake/ddp.pc.in ${PROJECT_BINARY_DIR}/package/${name}.pc @ONLY)
    install(FILES ${PROJECT_BINARY_DIR}/package/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT devel)
  endforeach()
endfunction()

# Installs the library, in both kinds if DDP_BOTH_KINDS is on.
function(ddp_install)
  set(DDP_CONFIG_HWLOC ${DDP_HAVE_HWLOC})
  set(DDP_CONFIG_MPI ${DDP_HAVE_MPI})
  set(DDP_CONFIG_CUDA ${DDP_HAVE_CUDA})
  set(DDP_CONFIG_CUDART ${CMAKE_INSTALL_LIBDIR}/ddp/libcudart_static.a)
  set(DDP_CONFIG_MPI_CXX_COMPILER "${MPI_CXX_COMPILER}")
  set(folder ${CMAKE_INSTALL_LIBDIR}/cmake/ddp)
  set(generated ${PROJECT_BINARY_DIR}/package)
  configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/ddpConfig.cmake.in ${generated}/ddpConfig.cmake
                                INSTALL_DESTINATION ${folder} PATH_VARS DDP_CONFIG_CUDART)
  write_basic_package_version_file(${generated}/ddpConfigVersion.cmake COMPATIBILITY SameMinorVersion)
  install(FILES ${generated}/ddpConfig.cmake ${generated}/ddpConfigVersion.cmake ${PROJECT_SOURCE_DIR}/cmake/ddpTorch.cmake
                ${PROJECT_SOURCE_DIR}/cmake/FindLibTorch.cmake DESTINATION ${folder} COMPONENT devel)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ddp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT devel
          FILES_MATCHING PATTERN "*.h")
  ddp_install_kind(ddp)
  ddp_kind(ddp kinds)
  if(DDP_BOTH_KINDS)
    ddp_install_kind(ddp_other_kind)
    set(kinds static shared)
  endif()
  ddp_install_pkg_config(${kinds})
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/NOTICE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT doc)
endfunction()
