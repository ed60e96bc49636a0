#include "loops.hpp"

namespace sparsync {

const Kernels *kernels_scalar() {
    static const Kernels kernels{"scalar", all_finite};
    return &kernels;
}

}  // namespace sparsync
