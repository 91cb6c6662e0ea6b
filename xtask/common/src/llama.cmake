# CMake reads this file at llama.cpp's `project` (CMAKE_PROJECT_llama.cpp_INCLUDE). The file saves
# most of the time that the C++ takes to compile. ggml, its backends and libllama stay as their
# authors build them.

# What the programs around these do themselves takes no time worth measuring.
set(fast ggml ggml-base ggml-cpu ggml-cpu-feats ggml-rpc llama)
set(name "$<TARGET_PROPERTY:NAME>")
add_compile_options("$<$<NOT:$<IN_LIST:${name},${fast}>>:-O$<STREQUAL:${name},test-backend-ops>>")

# The headers of these files take longer than what is in them.
function(join_sources)
    foreach(library llama-common mtmd)
        if(TARGET ${library})
            set_target_properties(${library} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 6)
        endif()
    endforeach()
    # The first file specialises templates that others use; in b10488, the second has a function
    # with the name of another; the other two refuse the headers of their library.
    foreach(alone llama-common:json.cpp llama-common:chat.cpp mtmd:mtmd-helper.cpp
            mtmd:mtmd-helper-gen.cpp)
        string(REPLACE ":" ";" alone ${alone})
        list(POP_FRONT alone library file)
        if(TARGET ${library})
            get_target_property(folder ${library} SOURCE_DIR)
            set_source_files_properties(${folder}/${file} TARGET_DIRECTORY ${library}
                PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
        endif()
    endforeach()
endfunction()
cmake_language(DEFER CALL join_sources)
