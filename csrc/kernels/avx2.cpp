#include "loops.hpp"

namespace sparsync {

const Kernels *kernels_avx2() {
#ifdef __AVX2__
    static const Kernels kernels{"avx2", all_finite};
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        return &kernels;
#endif
    return nullptr;
}

}  // namespace sparsync
