// Prints the layout of the declarations that items.inc lists, one line for each.
//
// Compiled twice: with the plugin's headers (-DOURS="file") and with those of a real ggml. In C++,
// which can print the type of a field, including the parameters of a callback.

#ifdef OURS
#    include OURS
#    define FUNCTION_TYPE(name) name##_fn
#else
#    include "ggml-backend-impl.h"
#    include "ggml-impl.h"
#    include <type_traits>
// ggml declares the functions that a plugin exports as pointer types only.
extern std::remove_pointer_t<ggml_backend_init_t>  ggml_backend_init;
extern std::remove_pointer_t<ggml_backend_score_t> ggml_backend_score;
#    define FUNCTION_TYPE(name) decltype(name)
#endif

#include <cstddef>
#include <cstdio>
#include <cxxabi.h>
#include <typeinfo>

static const char * type_name(const std::type_info & type) {
    int status = 0;
    return abi::__cxa_demangle(type.name(), nullptr, nullptr, &status);
}

template <class T> static void print(const char * what, size_t offset) {
    std::printf("%s at %zu, %zu bytes: %s\n", what, offset, sizeof(T), type_name(typeid(T)));
}

#define STRUCT(s) \
    std::printf("struct " #s ": %zu bytes, aligned to %zu\n", sizeof(struct s), alignof(struct s));
#define FIELD(s, f) \
    { \
        using owner = struct s; \
        print<decltype(owner::f)>(#s "." #f, offsetof(owner, f)); \
    }
#define VALUE(v) std::printf(#v " = %lld\n", static_cast<long long>(v));
#define FUNCTION(n) std::printf(#n ": %s\n", type_name(typeid(FUNCTION_TYPE(n))));

int main() {
#include "items.inc"
}
