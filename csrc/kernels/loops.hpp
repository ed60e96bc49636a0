#pragma once
#include "kernels.hpp"
#include <cstring>

namespace sparsync {
namespace {

bool all_finite(const float *x, int64_t n) {
    uint32_t bad = 0;
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bad |= (bits & 0x7f800000u) == 0x7f800000u;
    }
    return !bad;
}

}  // namespace
}  // namespace sparsync
