# SPDX-License-Identifier: Apache-2.0
# Adds the licences of third-party code that is compiled into _native to those in the wheel. LICENSES.md lists the code.
set(script "import importlib.metadata as m; \
print(next(f.locate() for f in m.files('nanobind') if f.name == 'LICENSE'))")
execute_process(COMMAND ${Python_EXECUTABLE} -c "${script}"
                OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE licence COMMAND_ERROR_IS_FATAL ANY)
install(FILES ${licence} DESTINATION ${SKBUILD_METADATA_DIR}/licenses RENAME nanobind.txt)

# robin_map has its licence only at the top of its headers.
file(READ ${NB_DIR}/ext/robin_map/include/tsl/robin_map.h header)
string(REGEX MATCH "MIT License.*SOFTWARE\\.\n \\*/" licence "${header}")
if(NOT licence)
  message(FATAL_ERROR "expected a licence at the head of nanobind's robin_map.h, found none: look what is under it now, "
                      "and mend LICENSES.md and scripts/release/licences.cmake")
endif()
string(REGEX REPLACE "\n \\*[ /]?" "\n" licence "${licence}")
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/robin_map.txt "${licence}")
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/robin_map.txt DESTINATION ${SKBUILD_METADATA_DIR}/licenses)

if(CMAKE_CXX_COMPILER MATCHES "/zig$")  # the run times that Zig links in, as it brings their texts
  get_filename_component(zig ${CMAKE_CXX_COMPILER} DIRECTORY)
  set(texts LICENSE=zig lib/libcxx/LICENSE.TXT=llvm)
  if(WIN32)
    list(APPEND texts lib/libc/mingw/COPYING=mingw-w64)
  endif()
  foreach(text IN LISTS texts)
    string(REGEX MATCH "(.*)=(.*)" text ${text})
    install(FILES ${zig}/${CMAKE_MATCH_1} DESTINATION ${SKBUILD_METADATA_DIR}/licenses RENAME ${CMAKE_MATCH_2}.txt)
  endforeach()
endif()
