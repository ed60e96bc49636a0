// Moving a vector: it is copied, and where it came from becomes zero; with what is put into either on the way.
#pragma once

#include <cstdint>
#include <vector>

#include "sparse.hpp"

namespace sparsync {

// to[i] = from[i]; from[i] = 0. The two do not overlap. Then the values of `kept` in `to`, and those of `written` in `from`. Positions ascend inside [0, n) in each of them.
void move_put(float *to, float *from, int64_t n, const std::vector<SparseView> &kept, const std::vector<SparseView> &written);

}  // namespace sparsync
