// Sums of the bits in a tensor, to tell whether any has changed.
#pragma once

#include <cstdint>

namespace sparsync {

// The digest of `nbytes` bytes: words, as long as divide that number, are mixed with their place, and added modulo 2^64. Where there are
// many, those in the same column of a matrix are added first.
int64_t digest(const void *bytes, int64_t nbytes);

}  // namespace sparsync
