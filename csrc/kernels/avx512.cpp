#include "loops.hpp"

namespace sparsync {

const Kernels *kernels_avx512() {
#ifdef __AVX512F__
    static const Kernels kernels{"avx512", all_finite};
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("bmi2"))
        return &kernels;
#endif
    return nullptr;
}

}  // namespace sparsync
