// The kernels of one instruction set, as a table of functions; what they compute is said in src/sparsync/kernels/reference.py.
#pragma once

#include <cstdint>

namespace sparsync {

struct Kernels {
    const char *name;
    bool (*all_finite)(const float *x, int64_t n);
};

// Null where this build or this processor lacks the instructions.
const Kernels *kernels_scalar();
const Kernels *kernels_avx2();
const Kernels *kernels_avx512();

}  // namespace sparsync
