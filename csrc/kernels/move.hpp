// Moving a vector: it is copied, and where it came from becomes zero.
#pragma once

#include <cstdint>

namespace sparsync {

// to[i] = from[i]; from[i] = 0. The two do not overlap.
void move(float *to, float *from, int64_t n);

}  // namespace sparsync
