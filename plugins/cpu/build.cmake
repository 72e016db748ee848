# Builds SOURCE below PLACE and lays the library in PLACE/stage; a compiler that is absent or fails leaves its first
# error there instead, in not_built.txt, and no failure.
include("${PLACE}/options.cmake")
set(build "${PLACE}/native")
set(result "${PLACE}/stage/wicore_trt/_native")
file(REMOVE_RECURSE "${PLACE}/stage")
if(EXISTS "${build}/CMakeCache.txt")  # of a clone that was moved, or copied into an image: CMake refuses it
  file(READ "${build}/CMakeCache.txt" cache)
  string(FIND "${cache}" "CMAKE_HOME_DIRECTORY:INTERNAL=${SOURCE}\n" source_is_here)
  string(FIND "${cache}" "CMAKE_CACHEFILE_DIR:INTERNAL=${build}\n" build_is_here)
  if(source_is_here LESS 0 OR build_is_here LESS 0)
    file(REMOVE_RECURSE "${build}")
  endif()
endif()
file(MAKE_DIRECTORY "${result}")

function(run)
  execute_process(COMMAND "${CMAKE_COMMAND}" ${ARGN} OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE failed)
  message("${text}")
  if(failed)
    set(line "cmake ended with ${failed}")
    foreach(pattern "[Ee]rror" "is not able to compile" "No CMAKE_CXX_COMPILER" " error: ")  # the last one that is found tells most
      if(text MATCHES "[^\n]*${pattern}[^\n]*")
        string(STRIP "${CMAKE_MATCH_0}" line)
      endif()
    endforeach()
    string(REGEX REPLACE "^is not" "the C++ compiler is not" line "${line}")
    file(WRITE "${result}/not_built.txt" "${line}\n")
    file(REMOVE_RECURSE "${build}")  # a compiler that was mended is looked at afresh
    message(WARNING "THE NATIVE CPU KERNELS WERE NOT BUILT: ${line}\nThe package works without them, several times slower "
      "on a CPU. Install another C++17 compiler (g++ 11 to 14, or clang) and install again.")
  endif()
  set(failed "${failed}" PARENT_SCOPE)
endfunction()

run(-S "${SOURCE}" -B "${build}" -G "${generator}" ${options})
if(NOT failed)
  run(--build "${build}" --parallel)
endif()
if(NOT failed)
  run(--install "${build}" --prefix "${PLACE}/stage" --strip)
endif()
