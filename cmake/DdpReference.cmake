# The target `reference`: pages made of the public headers and docs/ by Doxygen, where that is installed.
find_package(Doxygen QUIET)
if(DOXYGEN_FOUND)
  configure_file(${PROJECT_SOURCE_DIR}/docs/Doxyfile.in ${PROJECT_BINARY_DIR}/Doxyfile @ONLY)
  add_custom_target(reference COMMAND ${DOXYGEN_EXECUTABLE} ${PROJECT_BINARY_DIR}/Doxyfile VERBATIM
                    COMMENT "Reference: ${PROJECT_BINARY_DIR}/reference/html/index.html")
endif()
