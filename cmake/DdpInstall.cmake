# Installing the library so that `find_package(ddp)` works in another project.
include(CMakePackageConfigHelpers)

# Installs TARGET (the library) under the name ddp, with the headers and the CMake package, as part of COMPONENT. Arguments that follow go to
# every install() command.
function(ddp_install target component)
  get_target_property(type ${target} TYPE)
  # What the package's users must find again: a static library brings all that it was built with, a shared one what its headers include.
  set(DDP_CONFIG_STATIC OFF)
  if(type STREQUAL "STATIC_LIBRARY")
    set(DDP_CONFIG_STATIC ON)
  endif()
  set(DDP_CONFIG_HWLOC ${DDP_HAVE_HWLOC})
  set(DDP_CONFIG_MPI ${DDP_HAVE_MPI})
  set(DDP_CONFIG_CUDA ${DDP_HAVE_CUDA})
  set(DDP_CONFIG_CUDART ${CMAKE_INSTALL_LIBDIR}/ddp/libcudart_static.a)
  set(DDP_CONFIG_MPI_CXX_COMPILER "${MPI_CXX_COMPILER}")

  set(folder ${CMAKE_INSTALL_LIBDIR}/cmake/ddp)
  set(generated ${PROJECT_BINARY_DIR}/package/${target})
  configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/ddpConfig.cmake.in ${generated}/ddpConfig.cmake
                                INSTALL_DESTINATION ${folder} PATH_VARS DDP_CONFIG_CUDART)
  write_basic_package_version_file(${generated}/ddpConfigVersion.cmake COMPATIBILITY SameMinorVersion)

  # Before 1.0 a minor version may change the binary interface.
  set_target_properties(${target} PROPERTIES EXPORT_NAME ddp OUTPUT_NAME ddp VERSION ${PROJECT_VERSION}
                                             SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  set(common COMPONENT ${component} ${ARGN})
  install(TARGETS ${target} EXPORT ${target}Targets
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} ${common}
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ${common} NAMELINK_COMPONENT ${component}
          INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT ${target}Targets FILE ddpTargets.cmake NAMESPACE ddp:: DESTINATION ${folder} ${common})
  install(FILES ${generated}/ddpConfig.cmake ${generated}/ddpConfigVersion.cmake ${PROJECT_SOURCE_DIR}/cmake/ddpTorch.cmake
                ${PROJECT_SOURCE_DIR}/cmake/FindLibTorch.cmake DESTINATION ${folder} ${common})
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ddp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} ${common}
          FILES_MATCHING PATTERN "*.h")
  # The CUDA runtime goes along with a static library, so that its users need no CUDA toolkit; its licence allows that.
  if(DDP_CONFIG_STATIC AND DDP_HAVE_CUDA)
    install(FILES $<TARGET_FILE:CUDA::cudart_static> DESTINATION ${CMAKE_INSTALL_LIBDIR}/ddp ${common})
  endif()
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} ${common})
endfunction()
