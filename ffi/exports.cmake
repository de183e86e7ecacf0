# The extensions export PyInit_* alone.
#
# Some compilers link libstdc++ statically, so that an extension has its own copy beside the
# process's. The loader binds unique symbols (STB_GNU_UNIQUE; the ids of a locale's facets, for
# example) to the first definition in the process, even of libraries opened with RTLD_LOCAL. The
# extension's streams would then look up facets by the ids of the other libstdc++: texts break off
# at a number, or the process crashes. Local symbols are bound to the extension's own definitions.
# Hidden visibility does not suffice, because libstdc++ gives namespace std the default one
# explicitly.
#
# Our sources use no streams (`make lint-streams`). XLA's headers do, before a handler of ours runs:
# for the errors of a call with wrong numbers or types of operands, results or attributes (as in
# programs that another version of jax_ep exported), or without the context that the handler binds
# (stream, device, state); and while it runs if the runtime takes no task or no completion.

set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)

set(jax_ep_exports "${CMAKE_CURRENT_LIST_DIR}/exports.map")

# jax_ep_export_init_alone(EXTENSION): after everything that the extension is linked with.
#
# Adds the target static_libstdcxx, too, which links the objects of all extensions a second time,
# with a libstdc++ of their own, into the folder of this name, for tools/static_libstdcxx.py.
function(jax_ep_export_init_alone extension)
  target_link_options(${extension} PRIVATE
    "LINKER:--version-script=${jax_ep_exports}" LINKER:--exclude-libs,ALL)
  set_target_properties(${extension} PROPERTIES LINK_DEPENDS "${jax_ep_exports}")

  set(copy ${extension}_static_libstdcxx)
  add_library(${copy} MODULE EXCLUDE_FROM_ALL $<TARGET_OBJECTS:${extension}>)
  foreach(property LINK_DEPENDS LINK_LIBRARIES LINK_OPTIONS LINKER_LANGUAGE PREFIX SUFFIX)
    get_target_property(value ${extension} ${property})
    set_target_properties(${copy} PROPERTIES ${property} "${value}")
  endforeach()
  target_link_options(${copy} PRIVATE -static-libstdc++ -static-libgcc)
  set_target_properties(${copy} PROPERTIES
    OUTPUT_NAME ${extension}
    LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/static_libstdcxx")
  if(NOT TARGET static_libstdcxx)
    add_custom_target(static_libstdcxx)
  endif()
  add_dependencies(static_libstdcxx ${copy})
endfunction()
